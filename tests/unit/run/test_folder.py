"""A run's folder on disks that are shared, full, or have no locks."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_grpo import UserError
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.run.continuation import check_same_run, data_files, keep_inputs
from nemo_grpo.run.folder import RunFolder, own_copy
from nemo_grpo.support import files, shipped
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.jsonl import write_problems

ROOT = Path(__file__).parents[3]


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_full_disk_does_not_damage_the_recipe_of_a_run(tmp_path, monkeypatch):
    RunFolder(tmp_path / "run").open("before: 1\n", from_step=-1)
    write = Path.write_text

    def half(self, text, *args, **options):
        write(self, text[: len(text) // 2], *args, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half)
        with pytest.raises(UserError, match="No space left"):
            RunFolder(tmp_path / "run", resume=True).open("after: 1\n", from_step=-1)
    assert (tmp_path / "run/recipe.resolved.yaml").read_text() == "before: 1\n"
    assert "python" in json.loads((tmp_path / "run/versions.json").read_text())


def test_run_whose_checkpoints_are_gone_keeps_what_it_logged(tmp_path, caplog):
    run = RunFolder(tmp_path / "run")
    run.open("", from_step=-1)
    run.append_metrics({"step": 7, "loss": 1.0})
    run.close()
    RunFolder(tmp_path / "run", resume=True).open("", from_step=-1)
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert json.loads((tmp_path / "run/metrics.old.jsonl").read_text())["step"] == 7
    assert "begins anew" in caplog.text


def test_run_folder_without_locks_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def lockf(*_args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "lockf", lockf)
    RunFolder(tmp_path / "run").open("", from_step=-1)
    assert "no locks" in caplog.text


def test_resuming_with_an_empty_checkpoint_folder_is_refused_while_the_old_one_has_checkpoints(tmp_path):
    def recipe(folder):
        return load_recipe(
            shipped.recipe_file("quickstart"), [f"checkpointing.checkpoint_dir={tmp_path / folder}"]
        )

    (tmp_path / "recipe.resolved.yaml").write_text(recipe("old").to_yaml())
    check_same_run(recipe("new"), tmp_path / "recipe.resolved.yaml")  # there is nothing to lose
    (tmp_path / "old/step_000001").mkdir(parents=True)
    with pytest.raises(UserError, match=r"new has no checkpoint, .*old has step_000001; move"):
        check_same_run(recipe("new"), tmp_path / "recipe.resolved.yaml")
    shutil.move(tmp_path / "old", tmp_path / "new")
    check_same_run(recipe("new"), tmp_path / "recipe.resolved.yaml")


@pytest.fixture
def begun_on_files(tmp_path) -> tuple[Recipe, Path]:
    """A recipe with files of problems, and the record of a run of it, without hashes."""
    for file in ("train.jsonl", "held-out.jsonl"):
        write_problems(tmp_path / file, [Problem(file, "What is 1 + 1?", "2")])
    files = f"train_files: [{tmp_path}/train.jsonl], validation_files: [{tmp_path}/held-out.jsonl]"
    recipe = load_recipe(
        shipped.recipe_file("quickstart"),
        [f"nemo_grpo.task={{_override_: true, name: math, {files}}}", "grpo.max_val_samples=1"],
    )
    resolved = tmp_path / "run" / "recipe.resolved.yaml"
    resolved.parent.mkdir()
    resolved.write_text(recipe.to_yaml())
    return recipe, resolved


DATA_FILES = pytest.mark.parametrize("name", ["train.jsonl", "held-out.jsonl"])


@DATA_FILES
def test_a_copy_of_the_data_is_the_same_file(begun_on_files, tmp_path, name):
    recipe, resolved = begun_on_files
    keep_inputs(resolved.parent, data_files(recipe))
    shutil.copy(tmp_path / name, tmp_path / "copy")
    (tmp_path / "copy").replace(tmp_path / name)
    os.utime(tmp_path / name, (1, 1))
    check_same_run(recipe, resolved)


@DATA_FILES
def test_data_that_have_changed_are_refused(begun_on_files, tmp_path, name):
    recipe, resolved = begun_on_files
    keep_inputs(resolved.parent, data_files(recipe))
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1] + b" ")
    keep_inputs(resolved.parent, data_files(recipe))  # keeps the first hashes
    with pytest.raises(
        UserError, match=rf"{name} is not the file that .*run was trained with .* restore it, or st"
    ):
        check_same_run(recipe, resolved)
    (resolved.parent / "inputs.json").unlink()
    check_same_run(recipe, resolved)


def test_a_run_of_an_older_version_has_no_hashes_to_compare(begun_on_files):
    check_same_run(*begun_on_files)


HOLDER = """
import sys
from pathlib import Path
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.jsonl import write_problems
from nemo_grpo.run.folder import RunFolder
RunFolder(Path("one"), checkpoints=Path("shared")).open("", from_step=-1)
print("open", flush=True)
sys.stdin.read()
"""


def test_checkpoint_folder_of_another_run_is_refused_while_that_trains_and_afterwards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as other:
        assert other.stdout.readline() == "open\n"
        two = RunFolder(Path("two"), checkpoints=Path("shared"))
        with pytest.raises(UserError, match="shared is in use by another run"):
            two.open("", from_step=-1)
        with pytest.raises(UserError, match="one is in use by another run"):
            RunFolder(Path("one"), resume=True).lock()
        with pytest.raises(UserError, match="one is in use by another run"):
            RunFolder(Path("three"), checkpoints=Path("one/checkpoints")).open("", from_step=-1)
        assert not Path("one/checkpoints").exists()
        Path("shared/step_000001").mkdir()
        other.communicate("")
    with pytest.raises(UserError, match="checkpoint_dir=shared holds another run's checkpoints"):
        two.open("", from_step=-1)
    assert not Path("two").exists()
    resumed = RunFolder(Path("one"), checkpoints=Path("shared"), resume=True)
    resumed.lock()
    resumed.open("", from_step=1)
    resumed.close()


def test_own_files_of_like_names_are_kept_apart(tmp_path):
    RunFolder(tmp_path).keep_settings("", {"a/b.py": "1", "a_b.py": "2", "../b.py": "3", "a%2Fb.py": "4"}, -1)
    names = ("a/b.py", "a_b.py", "../b.py", "a%2Fb.py")
    assert [own_copy(tmp_path, name).read_text() for name in names] == ["1", "2", "3", "4"]
    assert len(names_in(tmp_path / "own")) == 4


def test_lines_that_are_no_rows_are_left_out_when_a_run_resumes(tmp_path, caplog):
    path = tmp_path / "run"
    path.mkdir()
    rows = [b'{"step": 1}', b"[1]", b"3", b"null", b'{"loss": 1}', b'{"step": "x"}', b"[" * 100_000, b"\xff"]
    (path / "metrics.jsonl").write_bytes(b"\n".join([*rows, b'{"step": 2}', b'{"step": 9}', b'{"step":']))
    RunFolder(path, resume=True).open("", from_step=2)
    assert (path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert "metrics.jsonl: 7 damaged lines are left out" in caplog.text
