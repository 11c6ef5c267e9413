"""The installed NeMo-RL: its verdict in the driver, and rebinding of its names; without NeMo-RL."""

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from nemo_grpo.nemorl import compat, policy
from nemo_grpo.nemorl.config import ClusterRun, load_run
from nemo_grpo.nemorl.doctor import diagnose, recorded
from nemo_grpo.nemorl.host_api import (
    ENTROPIES,
    EVERY_RUN,
    HEAD,
    HOST_API,
    STAGES,
    SUPERVISED,
    V0_7_0,
    VIDEO_SETTINGS,
    Name,
)
from nemo_grpo.nemorl.nemo_rl_batches import fix_video_frames
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support.errors import UserError


@pytest.fixture
def install(monkeypatch):
    """A function that makes HEAD with some other descriptions the installed NeMo-RL; None takes one away."""
    monkeypatch.setattr(compat, "version", lambda: HEAD)
    monkeypatch.setattr(compat, "has_name", lambda _: True)
    monkeypatch.setattr(compat, "import_name", lambda _: MagicMock)
    monkeypatch.setattr(compat, "package_folder", lambda: Path("/RL/nemo_rl"))

    def with_changes(changes):
        interface = {k: v for k, v in {**recorded(HEAD), **changes}.items() if v is not None}
        found = diagnose(interface)
        monkeypatch.setattr(compat, "installed", lambda: found)
        return found

    return with_changes


def test_what_setup_returns_is_named_by_place_and_counted():
    names = compat.Parts._fields
    assert compat.unpack_setup(names) == compat.Parts(**{name: name for name in names})
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


def test_a_tested_version_is_named_and_another_warned_of_with_its_differences(install, caplog):
    caplog.set_level("INFO")
    install({})
    assert compat.check() == HEAD
    assert caplog.messages == ["NeMo-RL has the interface of the commit 7ea279abf"]
    caplog.clear()
    install({"policy": recorded(V0_7_0)["policy"], "controller rows": None})
    compat.check()
    (record,) = caplog.records
    text = record.getMessage()
    assert record.levelname == "WARNING"
    assert "/RL/nemo_rl is untested; tested: the release 0.7.0 or the commit 7ea279abf" in text
    assert "changed nemo_rl.models.policy.lm_policy:Policy.__init__: parameters: -skip_weight_load=" in text
    assert "gone nemo_rl.experience.payload:record_to_train_batch" in text


def test_a_broken_version_or_one_without_a_name_is_refused_with_the_reason(install, monkeypatch):
    install({"nemo_rl.utils.config:load_config": None})
    with pytest.raises(
        UserError, match=r"does not fit \(every run\): gone nemo_rl\.utils\.config:load_config; use"
    ):
        compat.check()
    install({})
    monkeypatch.setattr(compat, "has_name", lambda name: not name.endswith(":init_ray"))
    with pytest.raises(UserError, match=r"lacks nemo_rl\.distributed\.virtual_cluster:init_ray; use a"):
        compat.check()


def broken(key):
    return {key: {**recorded(HEAD)[key], "kind": "value"}}


@pytest.mark.parametrize(
    ("key", "part"),
    [
        ("post-processor call", ENTROPIES),
        ("temperature", STAGES),
        ("nemo_rl.algorithms.sft:sft_train", SUPERVISED),
        ("metrics", EVERY_RUN),
    ],
)
def test_only_runs_that_need_the_broken_part_are_refused(install, key, part, caplog):
    found = install(broken(key))
    assert found.verdict == "broken"
    for other in (ENTROPIES, STAGES, SUPERVISED, EVERY_RUN):
        if other != part:
            compat.require(other)
    with pytest.raises(UserError, match=f"does not fit \\({part}\\)"):
        compat.require(part)
    if part != EVERY_RUN:
        compat.check()
        assert "is broken" in caplog.text


def test_a_policy_with_entropies_asks_for_its_parts(install):
    install(broken("post-processor call"))

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
        Name("go", "made_up:go", also=also),
        Name("find", "made_up:Manager.find"),
        Name("gone", "made_up:gone"),
        Name("newer", "made_up:gone", versions=(HEAD,)),
    ):
        monkeypatch.setitem(HOST_API, name.key, name)
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


def test_a_name_that_every_tested_version_has_must_be_there(modules):
    with pytest.raises(UserError, match=r"no made_up:gone; use a tested version: the release 0\.7\.0 or"):
        compat.rebind("gone", lambda theirs: theirs)
    compat.rebind("newer", lambda theirs: theirs)
