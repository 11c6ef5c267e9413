"""Responses on disk: kills that they survive, and conditions that are not mixed."""

import errno
import json
import multiprocessing
import shutil

import pytest

from nemo_grpo.evaluate.config import fingerprint
from nemo_grpo.evaluate.sampling import Completion, ResponseCache, ResponseLog
from nemo_grpo.support import files
from nemo_grpo.support.errors import UserError

ONE, TWO = Completion("a", 1, False), Completion("b\u2028c", 2, True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "responses.jsonl"


def test_responses_come_back_from_the_file(path):
    with ResponseLog(path) as log:
        cache = ResponseCache(log, "set", {"seed": 1})
        assert cache.get("p", [1, 2], 2, greedy=False) is None
        cache.put([("p", [1, 2], [ONE, TWO])], greedy=False)
        cache.put([("p", [1, 2], [TWO])], greedy=True)
    with ResponseLog(path) as log:
        cache = ResponseCache(log, "set", {"seed": 1})
        assert cache.get("p", [1, 2], 2, greedy=False) == [ONE, TWO]
        assert cache.get("p", [1, 2], 1, greedy=False) == [ONE]
        assert cache.get("p", [1, 2], 1, greedy=True) == [TWO]
        assert len(log) == 3
    assert json.loads(path.read_text().splitlines()[2])["sample"] == "greedy"


@pytest.mark.parametrize(
    ("benchmark", "conditions", "problem", "prompt", "count"),
    [
        ("other", {"seed": 1}, "p", [1], 1),
        ("set", {"seed": 2}, "p", [1], 1),
        ("set", {"seed": 1}, "q", [1], 1),
        ("set", {"seed": 1}, "p", [1, 2], 1),
        ("set", {"seed": 1}, "p", [1], 2),
    ],
)
def test_nothing_is_mixed_with_other_conditions(path, benchmark, conditions, problem, prompt, count):
    with ResponseLog(path) as log:
        ResponseCache(log, "set", {"seed": 1}).put([("p", [1], [ONE])], greedy=False)
        assert ResponseCache(log, benchmark, conditions).get(problem, prompt, count, greedy=False) is None
        assert ResponseCache(log, "set", {"seed": 1}).get("p", [1], 1, greedy=False) == [ONE]


def test_a_disk_without_locks_is_used_with_a_warning(path, monkeypatch, caplog):
    def flock(*_args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with ResponseLog(path) as log:
        ResponseCache(log, "set", {}).put([("p", [1], [ONE])], greedy=False)
    assert f"No locks available), so do not start it twice; else: {path} is being written" in caplog.text


def test_a_last_line_that_was_cut_off_is_dropped(path):
    with ResponseLog(path) as log:
        ResponseCache(log, "set", {}).put([("p", [1], [ONE, TWO])], greedy=False)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with ResponseLog(path) as log:
        cache = ResponseCache(log, "set", {})
        assert len(log) == 1
        assert cache.get("p", [1], 1, greedy=False) == [ONE]
        cache.put([("p", [1], [ONE, TWO])], greedy=False)
    assert path.read_bytes() == whole


def test_a_line_that_is_damaged_in_the_middle_is_named(path):
    with ResponseLog(path) as log:
        ResponseCache(log, "set", {}).put([("p", [1], [ONE, TWO])], greedy=False)
    first, second = path.read_text().splitlines()
    path.write_text(f"{first[:-3]}\n{second}\n")
    with pytest.raises(UserError, match=r"responses\.jsonl:1 is damaged"):
        ResponseLog(path)


def _is_refused(path, answers):
    try:
        ResponseLog(path)
    except UserError as error:
        answers.put(str(error))


def test_two_evaluations_do_not_write_one_file(path):
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with ResponseLog(path):
        other = context.Process(target=_is_refused, args=(path, answers))
        other.start()
        assert "another evaluation" in answers.get()
        other.join()


def test_fingerprint_tells_models_apart(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(20_000_000))
    large = fingerprint(tmp_path)
    assert fingerprint(shutil.copytree(tmp_path, tmp_path / "copy")) == large
    for place in (1_234_567, 9_999_999, 19_999_999):  # one byte anywhere
        with weights.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert fingerprint(tmp_path) != large
        with weights.open("r+b") as file:
            file.seek(place)
            file.write(b"\0")
    assert fingerprint(tmp_path) == large
