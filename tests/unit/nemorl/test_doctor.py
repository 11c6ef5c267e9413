"""The doctor's verdict on changed interfaces, and on a tree; without NeMo-RL."""

import copy

import pytest
from typer.testing import CliRunner

from nemo_grpo.cli import app
from nemo_grpo.nemorl import doctor
from nemo_grpo.nemorl.doctor import diagnose, recorded
from nemo_grpo.nemorl.host_api import HEAD, SINGLE_CONTROLLER, V0_7_0

SETUP, TRAIN = "nemo_rl.algorithms.grpo:setup", "nemo_rl.algorithms.grpo:grpo_train"
INTERFACE = "nemo_rl.environments.interfaces:EnvironmentInterface"
CONFIG, SAMPLING = "nemo_rl.algorithms.grpo:MasterConfig", "nemo_rl.algorithms.grpo:dynamic_sampling (code)"
LEVELS = "nemo_rl.algorithms.loss.interfaces:LossType"
TEXTS = "texts of nemo_rl.algorithms.grpo"


def changed(key, part, change):
    """Of the newest tested interface after ``change(description[part])``, which returns the new value."""
    interface = copy.deepcopy(dict(recorded(HEAD)))
    interface[key] = {**interface[key], part: change(interface[key][part])}
    return diagnose(interface)


def swapped(names):
    return [names[1], names[0], *names[2:]]


@pytest.mark.parametrize(
    ("key", "part", "change", "verdict", "how"),
    [
        # Overrides pass further arguments on; what is replaced takes none that it does not know.
        ("post-processor call", "calls", lambda _: ["(input_ids=_)"], "broken", "missing"),
        ("post-processor call", "calls", lambda c: [f"{c[0][:-1]}, size=_)"], "untested", ", size=_)"),
        ("policy train", "parameters", lambda p: [*p, "draft="], "untested", "parameters: +draft="),
        ("policy train", "calls", lambda c: [*c, "(_, loss=_)"], "broken", "calls (_, loss=_), which"),
        ("loss", "calls", lambda _: ["(_, _, _, _, draft=_)"], "broken", "'draft'"),
        ("sampling", "calls", lambda _: ["(_, _, _, _, _)"], "broken", "missing a required argument"),
        ("stop", "calls", lambda _: ["(now=_)"], "untested", "calls: +(now=_) -()"),
        ("stop", "kind", lambda _: "async function", "broken", "was a function, is a async function"),
        # Names that are rebound only where they are known to be bound.
        ("estimator", "bound_in", lambda m: [*m, "nemo_rl.new"], "broken", "nemo_rl.new imports it"),
        ("metrics", "calls", lambda _: [], "broken", "NeMo-RL calls it nowhere"),
        # Values by position.
        (SETUP, "returns", lambda names: [*names, "more"], "broken", "returns 14 values, not 13"),
        (SETUP, "returns", swapped, "broken", "policy is no longer number 1"),
        (SETUP, "returns", lambda names: [*names[:-1], "aliases"], "untested", "+aliases -alias_to"),
        (TRAIN, "parameters", swapped, "broken", "policy is no longer number 1"),
        (TRAIN, "parameters", lambda p: [*p[:12], "more", *p[12:]], "broken", "argument: 'more'"),
        (TRAIN, "parameters", lambda p: [*p, "more="], "untested", "+more="),
        (SETUP, "parameters", lambda p: p[:-1], "broken", "unexpected keyword argument 'policy_factory'"),
        # What is read.
        (INTERFACE, "abstract", lambda names: [*names, "reset"], "broken", "does not define reset"),
        (CONFIG, "bases", lambda _: ["TypedDict"], "broken", "is a dictionary"),
        (LEVELS, "has", lambda h: {**h, "TOKEN_LEVEL": False}, "broken", "lacks"),
        (TEXTS, "gen_kl_error", lambda _: False, "broken", "lacks 'gen_kl_error"),
        ("metrics that the trainers read", "names", lambda n: [*n, "new"], "untested", "+new"),
        (SAMPLING, "code", lambda _: "0", "untested", "its code has changed"),
    ],
)  # fmt: skip
def test_a_change_is_named_and_judged(key, part, change, verdict, how):
    found = changed(key, part, change)
    assert found.verdict == verdict
    assert len(found.differences) == 1
    assert how in found.differences[0].how
    assert found.differences[0].breaks == (verdict == "broken")


def test_a_single_controller_that_does_not_fit_breaks_its_recipes_alone():
    key = "nemo_rl.algorithms.single_controller_utils.setup:setup_single_controller"
    (difference,) = (found := changed(key, "returns", lambda names: [*names, "more"])).differences
    assert (difference.breaks, difference.part, found.verdict) == (True, SINGLE_CONTROLLER, "untested")


@pytest.mark.parametrize(
    ("key", "verdict"),
    [
        ("metrics", "broken"),
        ("nemo_rl.utils.config:load_config", "broken"),
        ("examples/configs/grpo_math_1B_megatron.yaml", "broken"),
        ("controller rows", "untested"),  # 0.7.0 has none
        ("nemo_rl.algorithms.loss.interfaces:MetricNormalizer", "untested"),
    ],
)
def test_what_is_gone_breaks_if_every_tested_version_has_it(key, verdict):
    found = diagnose({name: value for name, value in recorded(HEAD).items() if name != key})
    assert found.verdict == verdict
    assert [(f.state, f.breaks) for f in found.differences] == [("gone", verdict == "broken")]


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_tree_is_judged_and_every_name_listed(monkeypatch, tmp_path):
    with pytest.raises(doctor.UserError, match="give the folder of NeMo-RL's clone"):
        doctor.diagnose_tree(tmp_path)
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "__init__.py").touch()
    result = run("--nemo-rl", str(tmp_path))
    assert result.exit_code == 1
    assert "gone     nemo_rl.algorithms.grpo:dynamic_sampling [every run]" in result.output
    for version in (HEAD, V0_7_0):
        monkeypatch.setattr(doctor, "observe", lambda _tree, version=version: recorded(version))
        result = run("--nemo-rl", str(tmp_path))
        assert result.exit_code == 0
        assert result.output.count("there    ") == len(recorded(version))
    shown = run("--nemo-rl", str(tmp_path), "--changes").output
    count = len(recorded(V0_7_0))
    assert shown == f"doctor: supported; 0 of {count} names differ from the release 0.7.0, 0 of them break\n"
    monkeypatch.delenv("NEMO_RL_SRC", raising=False)
    assert "NEMO_RL_SRC is not set" in str(run().exception)
