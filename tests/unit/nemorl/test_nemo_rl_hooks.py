"""Rebinding NeMo-RL's names, on modules made up here; and the shared observer."""

import sys
import types

import pytest
from unit.nemorl.loggers import Logger

from nemo_grpo.errors import UserError
from nemo_grpo.nemorl import hooks
from nemo_grpo.nemorl.host_api import HOOKS, Hook, install, placed
from nemo_grpo.nemorl.callbacks import LoggerObserver, listening


@pytest.fixture
def modules(monkeypatch):
    """Two modules that bind one function, and a class with a method."""

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
    monkeypatch.setitem(HOOKS, "go", Hook("made_up:go", "", "wrapped", "", also=also))
    monkeypatch.setitem(HOOKS, "find", Hook("made_up:Manager.find", "", "wrapped", ""))
    monkeypatch.setitem(HOOKS, "gone", Hook("made_up:gone", "", "wrapped", ""))
    monkeypatch.setitem(HOOKS, "newer", Hook("made_up:gone", "", "wrapped", "", versions=(hooks.HEAD,)))
    return defines, imports


def test_every_module_that_binds_the_name_is_rebound_and_restored(modules):
    with placed("go", lambda theirs: lambda: f"ours, {theirs()}"):
        assert [module.go() for module in modules] == ["ours, theirs"] * 2
    assert [module.go() for module in modules] == ["theirs"] * 2


def test_a_static_method_stays_one(modules):
    defines, _ = modules
    undo = install("find", lambda theirs: staticmethod(lambda path: f"{theirs(path)}!"))
    assert defines.Manager().find("a") == defines.Manager.find("a") == "a!"
    undo()
    assert defines.Manager().find("a") == "a"


def test_a_name_that_every_tested_version_has_must_be_there(modules):
    with pytest.raises(UserError, match=r"no made_up:gone; use a tested version: the release 0\.7\.0 or"):
        install("gone", lambda theirs: theirs)
    install("newer", lambda theirs: theirs)


def test_listeners_share_one_observer_and_hear_what_others_add():
    logger, heard = Logger(), []
    plain = logger.log_metrics
    with (
        listening(logger, told=lambda metrics, step, prefix: heard.append((dict(metrics), step, prefix))),
        listening(logger, adds=lambda metrics, step, prefix: {"twice": 2 * metrics["x"]}),
    ):
        observer = logger.log_metrics.__self__
        assert isinstance(observer, LoggerObserver)
        assert isinstance(observer.theirs.__self__, Logger), "not another observer"
        logger.log_metrics({"x": 1}, step=4, prefix="train")
        logger.log_metrics({"x": 2}, 5, None)
    logger.log_metrics({"x": 3}, 6)
    assert heard == [({"x": 1, "twice": 2}, 4, "train"), ({"x": 2, "twice": 4}, 5, "")]
    assert [metrics for metrics, *_ in logger.calls] == [{"x": 1, "twice": 2}, {"x": 2, "twice": 4}, {"x": 3}]
    assert logger.log_metrics == plain
