"""Remains of a killed conversion to Megatron are found where NeMo-RL looks, and go when nobody writes."""

import os
from unittest.mock import Mock, patch

import pytest

from nemo_grpo.nemorl.workarounds import killed_conversion
from nemo_grpo.nemorl.workarounds.killed_conversion import (
    ITERATION,
    LAST_FILE,
    POLL_S,
    STILL_S,
    remove_remains,
)
from nemo_grpo.support.errors import UserError

NOW = 1_000_000.0


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(killed_conversion.compat, "import_name", lambda _: lambda: str(tmp_path / "nemo_rl"))
    return tmp_path / "nemo_rl"


def converted(folder, age, *names):
    """A conversion whose files were written so many seconds ago."""
    folder = folder / ITERATION
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", *names):
        (folder / name).write_text("x")
        os.utime(folder / name, (NOW - age, NOW - age))
    os.utime(folder, (NOW - age, NOW - age))
    return folder


class Time:
    """A clock that only sleeping moves; what happens meanwhile is given. It stands for the module `time`."""

    def __init__(self, meanwhile=lambda _now: None):
        self.now, self.slept, self.meanwhile = NOW, [], meanwhile

    def time(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds
        self.meanwhile(self.now)

    def run(self, policy):
        with patch.object(killed_conversion, "time", self):
            remove_remains(policy)
        return self.slept


def test_remains_that_nobody_writes_to_are_removed(root):
    remains = converted(root / "org" / "model", STILL_S)
    assert Time().run({"model_name": "org/model"}) == []
    assert list(remains.parent.iterdir()) == []


def test_a_finished_conversion_stays(root):
    finished = converted(root / "org" / "finished", 10 * STILL_S, LAST_FILE)
    for name in ("finished", "other"):
        assert Time().run({"model_name": f"org/{name}"}) == []
    assert (finished / LAST_FILE).exists()


def test_conversion_of_another_job_is_waited_for(root):
    folder = converted(root / "org" / "model", 5)

    def write(now):
        """A file now and then, for longer than the wait; in the end the last one."""
        name = LAST_FILE if now >= NOW + 2 * STILL_S else "__1_0.distcp"
        (folder / name).write_text("x")
        os.utime(folder / name, (now, now))
        os.utime(folder, (now, now))

    assert sum(Time(write).run({"model_name": "org/model"})) == 2 * STILL_S
    assert (folder / LAST_FILE).exists()


def test_remains_of_a_killed_job_are_removed_after_the_waiting_time(root):
    folder = converted(root / "org" / "model", 5)
    slept = Time().run({"model_name": "org/model"})
    assert sum(slept) == STILL_S - 5
    assert max(slept) == POLL_S
    assert not folder.exists()


def test_local_models_and_overridden_configurations_are_found(root, tmp_path):
    local = tmp_path / "a" / "model"
    local.mkdir(parents=True)
    name = f"model_{str(local).replace('/', '_')}"
    plain, overridden = (converted(root / f"{name}{tail}", STILL_S) for tail in ("", "__hfovr_0123456789ab"))
    other = converted(root / f"{name}2", STILL_S)
    Time().run({"model_name": str(local), "hf_config_overrides": {"rope_scaling": {}}})
    assert (plain.exists(), overridden.exists(), other.exists()) == (False, False, True)


@pytest.mark.parametrize(
    "settings",
    [{"pretrained_checkpoint": {"path": "p"}}, {"megatron_cfg": {"force_reconvert_from_hf": True}}],
)
def test_nothing_is_removed_if_nemo_rl_uses_no_conversion(root, settings):
    folder = converted(root / "org" / "model", STILL_S)
    Time().run({"model_name": "org/model", **settings})
    assert folder.exists()


def test_remains_that_cannot_be_removed_are_a_refusal_unless_another_job_was_first(root, monkeypatch):
    folder = converted(root / "org" / "model", STILL_S)
    rename = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(type(folder), "rename", rename)
    with pytest.raises(UserError, match=r"iter_0000000 is left from a killed conversion.*Permission denied"):
        Time().run({"model_name": "org/model"})
    rename.side_effect = FileNotFoundError(2, "No such file or directory")
    Time().run({"model_name": "org/model"})
