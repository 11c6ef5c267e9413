"""The installed NeMo-RL: its verdict in the driver, and rebinding of its names; without NeMo-RL."""

import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from nemo_grpo.nemorl import compat, policy
from nemo_grpo.nemorl.config import ClusterRun, load_run
from nemo_grpo.nemorl.doctor import Misfit
from nemo_grpo.nemorl.host_api import (
    ENTROPIES,
    EVERY_RUN,
    HEAD,
    HOST_API,
    REBOUND,
    STAGES,
    SUPERVISED,
    Name,
)
from nemo_grpo.nemorl.nemo_rl_batches import VIDEO_SETTINGS, fix_video_frames
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support.errors import UserError


@pytest.fixture
def install(monkeypatch):
    """A function that makes a NeMo-RL at HEAD without these names the installed one."""
    monkeypatch.setattr(compat, "version", lambda: HEAD)
    monkeypatch.setattr(compat, "import_name", lambda _: MagicMock)
    monkeypatch.setattr(compat, "package_folder", lambda: Path("/RL/nemo_rl"))

    def without(*names):
        misfits = [Misfit(name, None) for name in HOST_API if name.name in names]
        assert len(misfits) == len(names)
        monkeypatch.setattr(compat, "installed", lambda: misfits)

    return without


def test_what_setup_returns_is_named_by_place():
    names = compat.Parts._fields
    assert compat.unpack_setup(names) == compat.Parts(**{name: name for name in names})


def test_what_setup_returns_is_counted():
    names = compat.Parts._fields
    for wrong in (names[1:], (*names, "more")):
        with pytest.raises(UserError, match=f"returned {len(wrong)} values where {len(names)} are"):
            compat.unpack_setup(wrong)


def test_a_recipe_for_the_embedded_engine_is_sent_there():
    with pytest.raises(UserError, match=r"target=embedded: .*quickstart is for the embedded engine"):
        load_run("quickstart")


@pytest.mark.parametrize("has_videos", [True, False])
def test_frames_of_a_video_are_nemo_rls_to_fix_where_it_has_videos(has_videos, monkeypatch):
    asked = []
    monkeypatch.setattr(compat, "require", lambda _: None)
    monkeypatch.setattr(compat, "has_name", lambda name: has_videos and name == VIDEO_SETTINGS)
    monkeypatch.setattr(compat, "import_name", lambda _: lambda *sections: asked.append(sections))
    fix_video_frames(SimpleNamespace(policy="policy", data="data"))
    assert asked == [("policy", "data")] * has_videos


def test_a_version_that_fits_is_named(install, caplog):
    caplog.set_level("INFO")
    install()
    assert compat.check() == HEAD
    assert caplog.messages == ["NeMo-RL at /RL/nemo_rl has the signatures of the commit 7ea279abf"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nemo_rl.models.megatron.train:LogprobsPostProcessor.__call__", ENTROPIES),
        ("nemo_rl.models.megatron.train:apply_temperature_scaling", STAGES),
        ("nemo_rl.algorithms.sft:sft_train", SUPERVISED),
        ("nemo_rl.utils.logger:Logger.log_metrics", EVERY_RUN),
    ],
)
def test_only_runs_that_need_the_misfit_are_refused(install, name, part):
    install(name)
    for other in (ENTROPIES, STAGES, SUPERVISED, EVERY_RUN):
        if other != part:
            compat.require(other)
    expected = f"nemo_rl at /RL/nemo_rl does not fit ({part}): {name} is gone; use a tested version"
    with pytest.raises(UserError, match=re.escape(expected)):
        compat.require(part)
    if part == EVERY_RUN:
        with pytest.raises(UserError, match=re.escape(expected)):
            compat.check()
    else:
        compat.check()


def test_a_policy_with_entropies_asks_for_its_parts(install):
    install("nemo_rl.models.megatron.train:LogprobsPostProcessor.__call__")

    def make(recipe):
        loaded = load_recipe(recipe, ["nemo_grpo.run_name=x"])
        policy.policy_factory(ClusterRun(loaded, loaded.to_dict()), MagicMock())

    make("cluster-quickstart")
    with pytest.raises(UserError, match="variants with entropies"):
        make("erpo/erpo-qwen2.5-7b-1n8g")


@pytest.fixture
def modules(monkeypatch):
    class Manager:
        @staticmethod
        def find(path):
            return path

    defines, imports = types.ModuleType("made_up"), types.ModuleType("made_up_too")
    defines.go = imports.go = lambda: "theirs"
    defines.Manager = Manager
    monkeypatch.setitem(sys.modules, "made_up", defines)
    monkeypatch.setitem(sys.modules, "made_up_too", imports)
    also = ("made_up_too", "made_up_absent")
    for name in (
        Name("made_up:go", key="go", also=also),
        Name("made_up:Manager.find", key="find"),
        Name("made_up:gone", key="gone"),
    ):
        monkeypatch.setitem(REBOUND, name.key, name)
    return defines, imports


def test_every_module_that_binds_the_name_is_rebound_and_restored(modules):
    with compat.rebound("go", lambda theirs: lambda: f"ours, {theirs()}"):
        assert [module.go() for module in modules] == ["ours, theirs"] * 2
    assert [module.go() for module in modules] == ["theirs"] * 2


def test_a_static_method_stays_one(modules):
    defines, _ = modules
    undo = compat.rebind("find", lambda theirs: staticmethod(lambda path: f"{theirs(path)}!"))
    assert defines.Manager().find("a") == defines.Manager.find("a") == "a!"
    undo()
    assert defines.Manager().find("a") == "a"


def test_a_name_that_is_rebound_must_be_there(modules):
    with pytest.raises(UserError, match=r"no made_up:gone; use a tested version: the release 0\.7\.0 or"):
        compat.rebind("gone", lambda theirs: theirs)
