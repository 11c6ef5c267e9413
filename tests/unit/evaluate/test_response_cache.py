"""Responses on disk: kills that they survive, and conditions that are not mixed."""

import errno
import json
import multiprocessing
import shutil

import pytest

from nemo_grpo.evaluate.config import fingerprint
from nemo_grpo.evaluate.sampling import Completion, EvalRequest, ResponseFile
from nemo_grpo.support import files
from nemo_grpo.support.errors import UserError

ONE, TWO = Completion("a", 1, False), Completion("b\u2028c", 2, True)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out" / "responses.jsonl"


def request(id="p", tokens=(1,)):
    return EvalRequest(id, list(tokens), ())


def test_responses_come_back_from_the_file(path):
    asked = request("p", [1, 2])
    with ResponseFile(path) as file:
        assert file.get(asked, 2, 1) is None
        file.put([(asked, [ONE, TWO])], 1)
        file.put([(asked, [TWO])], None)
    with ResponseFile(path) as file:
        assert file.get(asked, 2, 1) == [ONE, TWO]
        assert file.get(asked, 1, 1) == [ONE]
        assert file.get(asked, 1, None) == [TWO]
        assert len(file) == 3
    assert json.loads(path.read_text().splitlines()[2])["seed"] is None


@pytest.mark.parametrize(
    ("id", "tokens", "seed", "count"),
    [("q", [1], 1, 1), ("p", [1, 2], 1, 1), ("p", [1], 2, 1), ("p", [1], None, 1), ("p", [1], 1, 2)],
)
def test_other_problems_prompts_and_seeds_find_nothing(path, id, tokens, seed, count):
    with ResponseFile(path) as file:
        file.put([(request(), [ONE])], 1)
        assert file.get(request(id, tokens), count, seed) is None
        assert file.get(request(), 1, 1) == [ONE]


def test_a_disk_without_locks_is_used_with_a_warning(path, monkeypatch, caplog):
    def flock(*_args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with ResponseFile(path) as file:
        file.put([(request(), [ONE])], None)
    assert f"No locks available), so do not start it twice; else: {path} is being written" in caplog.text


def test_a_last_line_that_was_cut_off_is_dropped(path):
    with ResponseFile(path) as file:
        file.put([(request(), [ONE, TWO])], 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with ResponseFile(path) as file:
        assert len(file) == 1
        assert file.get(request(), 1, 0) == [ONE]
        file.put([(request(), [ONE, TWO])], 0)
    assert path.read_bytes() == whole


def test_a_line_that_is_damaged_in_the_middle_is_named(path):
    with ResponseFile(path) as file:
        file.put([(request(), [ONE, TWO])], 0)
    first, second = path.read_text().splitlines()
    path.write_text(f"{first[:-3]}\n{second}\n")
    with pytest.raises(UserError, match=r"responses\.jsonl:1 is damaged"):
        ResponseFile(path)


def _is_refused(path, answers):
    try:
        ResponseFile(path)
    except UserError as error:
        answers.put(str(error))


def test_two_evaluations_do_not_write_one_file(path):
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    with ResponseFile(path):
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
