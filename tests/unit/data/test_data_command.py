"""``nemo-grpo data`` from the outside."""

import pytest
from typer.testing import CliRunner

from nemo_grpo.cli.data import app
from nemo_grpo.data import ALIASES, SOURCES
from nemo_grpo.support.errors import UserError


def run(*arguments, code=0, **options):
    result = CliRunner().invoke(app, [*map(str, arguments)], **options)
    if isinstance(result.exception, Exception):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def copy(tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/test.jsonl").write_text('{"problem": "1+1?", "answer": "2", "id": "0"}\n')
    return tmp_path / "copy"


def test_prepare_and_verify(copy, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    assert "aime25.jsonl: 1 problems from math-ai/aime25 (test)" in run(
        "prepare", "aime25", "--source", copy, "--out", out, "--any-count"
    )
    again = run("prepare", "aime25", "--any-count", "--out", out, env={"NEMO_GRPO_DATA_SOURCE": str(copy)})
    assert "up to date" in again
    assert "ok  aime25" in run("verify", out)
    (out / "aime25.jsonl").write_text("")
    assert "a sha256 other than" in run("verify", out, code=2)


def test_a_typo_stops_before_anything_is_fetched(tmp_path):
    with pytest.raises(UserError, match="unknown data set 'aime42'; did you mean 'aime2"):
        run("prepare", "open-rs", "aime42", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_one_folder_is_not_taken_for_two_repositories(copy, tmp_path):
    with pytest.raises(UserError, match="would be the copy of aime25 and amc23"):
        run("prepare", "aime25", "amc23", "--source", copy, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"holds no \*\.manifest\.json"):
        run("verify", tmp_path)


def test_list_names_every_data_set_and_cuts_none_short(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert "\N{HORIZONTAL ELLIPSIS}" not in run("list", env={"COLUMNS": "80"})
    output = run("list")  # nothing is wrapped in a pipe
    assert all(name in output for name in (*SOURCES, *ALIASES))
    assert all(source.origin.label in output for source in SOURCES.values())
    assert set(ALIASES.values()) <= set(SOURCES)
