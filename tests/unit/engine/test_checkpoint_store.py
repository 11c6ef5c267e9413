"""Checkpoints and run folders on disks that are shared, full, or have no locks."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_grpo import UserError
from nemo_grpo.engine.checkpoint_store import CheckpointStore
from nemo_grpo.engine.resume import check_same_run, data_files, keep_inputs
from nemo_grpo.engine.run_folder import RunFolder, checkpoints_in, own_copy, step_of
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support import files, shipped
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.jsonl import write_problems

ROOT = Path(__file__).parents[3]


def save(store, step, accuracy=0.0):
    (store.begin(step) / "weights").write_text("x")
    return store.complete(step, {"metrics": {"accuracy": accuracy}})


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("options", "kept", "best"),
    [
        ({"metric": "accuracy"}, [2, 4, 5], 2),
        ({"metric": "accuracy", "higher_is_better": False}, [1, 3, 5], 3),
        ({"metric": "another"}, [4, 5], None),  # without the metric the newest stay
        ({}, [4, 5], None),
        ({"keep_top_k": None}, [1, 2, 3, 4, 5], None),
        ({"keep_top_k": None, "metric": "accuracy"}, [1, 2, 3, 4, 5], 2),
    ],
)
def test_best_checkpoints_stay_beside_the_newest(tmp_path, options, kept, best):
    store = CheckpointStore(tmp_path, **{"keep_top_k": 2, **options})
    for step, accuracy in enumerate((0.3, 0.9, 0.1, 0.8, 0.5), 1):
        save(store, step, accuracy)
    link = [] if best is None else ["best"]
    assert names_in(tmp_path) == [*link, "latest", *(f"step_{step:06d}" for step in kept)]
    assert best is None or (tmp_path / "best").resolve() == tmp_path / f"step_{best:06d}"


def test_checkpoints_that_were_not_validated_neither_rank_nor_give_way_to_worse_ones(tmp_path):
    """A save every 3 steps, a validation every 4: steps 12 and 24 have the metric."""
    store = CheckpointStore(tmp_path, keep_top_k=2, metric="accuracy")
    for step in range(3, 28, 3):
        metrics = {"accuracy": 0.5 if step == 12 else 0.25} if step % 4 == 0 else {}
        (store.begin(step) / "weights").write_text("x")
        store.complete(step, {"metrics": metrics})
    assert [step_of(path) for path in checkpoints_in(tmp_path)] == [12, 21, 24, 27]
    assert (tmp_path / "best").readlink() == Path("step_000012")
    shutil.rmtree(tmp_path / "step_000012")
    store.remove_leftovers()
    assert (tmp_path / "best").readlink() == Path("step_000024")


def test_what_a_kill_leaves_behind_is_no_checkpoint_and_goes_with_the_next_save(tmp_path):
    store = CheckpointStore(tmp_path, keep_top_k=1, metric="accuracy")
    save(store, 1, accuracy=0.5)
    (store.begin(2) / "weights").write_text("half")
    (tmp_path / "step_000007").mkdir()  # copied by hand, and not yet whole
    shutil.copytree(store.latest(), tmp_path / "step_000009.good")  # somebody's
    (tmp_path / "latest").write_text("step_000000")  # killed between rename and this file
    assert store.latest() == tmp_path / "step_000001"
    store.remove_leftovers()
    assert (tmp_path / "latest").read_text() == "step_000001"
    save(store, 3, accuracy=0.9)
    assert names_in(tmp_path) == ["best", "latest", "step_000003", "step_000007", "step_000009.good"]
    for step in (999_999, 1_000_000):
        save(store, step)
    (tmp_path / "latest").write_text("step_999999")
    assert store.latest() == tmp_path / "step_1000000"


def test_checkpoint_that_cannot_be_removed_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    store = CheckpointStore(tmp_path, keep_top_k=1)
    save(store, 1)

    def rmtree(path, *_args, **_options):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))  # NFS keeps files that are open

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", rmtree)
        save(store, 2)
        save(store, 3)
    assert "Directory not empty" in caplog.text
    assert store.latest() == tmp_path / "step_000003"
    save(store, 4)  # and the leftovers go when they can
    assert names_in(tmp_path) == ["latest", "step_000004"]


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
    save(CheckpointStore(tmp_path / "old"), 1)
    with pytest.raises(UserError, match=r"new has no checkpoint, .*old has step_000001; move"):
        check_same_run(recipe("new"), tmp_path / "recipe.resolved.yaml")
    shutil.move(tmp_path / "old", tmp_path / "new")
    check_same_run(recipe("new"), tmp_path / "recipe.resolved.yaml")


@pytest.mark.parametrize("name", ["train.jsonl", "held-out.jsonl"])
def test_data_that_have_changed_are_refused_and_a_copy_is_not(tmp_path, name):
    for file in ("train.jsonl", "held-out.jsonl"):
        write_problems(tmp_path / file, [Problem(file, "What is 1 + 1?", "2")])
    files = f"train_files: [{tmp_path}/train.jsonl], validation_files: [{tmp_path}/held-out.jsonl]"
    recipe = load_recipe(
        shipped.recipe_file("quickstart"),
        [f"nemo_grpo.task={{_override_: true, name: math, {files}}}", "grpo.max_val_samples=1"],
    )
    run = tmp_path / "run"
    run.mkdir()
    resolved = run / "recipe.resolved.yaml"
    resolved.write_text(recipe.to_yaml())
    check_same_run(recipe, resolved)  # a run of an older version
    keep_inputs(run, data_files(recipe))
    shutil.copy(tmp_path / name, tmp_path / "copy")
    (tmp_path / "copy").replace(tmp_path / name)
    os.utime(tmp_path / name, (1, 1))
    check_same_run(recipe, resolved)
    flip_a_bit(tmp_path / name)
    keep_inputs(run, data_files(recipe))  # which keeps what it has
    with pytest.raises(
        UserError, match=rf"{name} is not the file that .*run was trained with .* restore it, or st"
    ):
        check_same_run(recipe, resolved)
    (run / "inputs.json").unlink()
    check_same_run(recipe, resolved)


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: flip_a_bit(path / "weights"), "weights does not match"),
        (lambda path: (path / "weights").unlink(), "weights does not match"),
        (lambda path: (path / "training_info.json").write_text("[]"), "training_info.json does not match"),
        (lambda path: (path / "training_info.json").unlink(), "training_info.json does not match"),
        (lambda path: (path / "SHA256SUMS").write_bytes(b"\xff\0"), "is not a list of hashes"),
        (lambda path: (path / "SHA256SUMS").unlink(), "SHA256SUMS lacks 2 of the files"),
        (lambda path: (path / "more").write_text(""), "SHA256SUMS lacks 1 of the files"),
        (
            lambda path: shutil.copytree(path.with_name("step_000001"), path, dirs_exist_ok=True),
            "another step",
        ),
    ],
)
def test_damaged_checkpoint_is_set_aside_for_the_newest_whole_one(tmp_path, caplog, damage, said):
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    damage(tmp_path / "step_000003")
    assert store.newest_whole() == tmp_path / "step_000002"
    assert said in caplog.text
    assert "set aside as damaged_step_000003" in caplog.text
    assert names_in(tmp_path) == ["damaged_step_000003", "latest", "step_000001", "step_000002"]
    flip_a_bit(save(store, 3) / "weights")
    assert store.newest_whole() == tmp_path / "step_000002"
    assert sum(name.startswith("damaged_step_000003") for name in names_in(tmp_path)) == 2


def test_run_without_a_whole_checkpoint_is_refused_and_left_alone(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        flip_a_bit(save(store, step) / "weights")
    before = names_in(tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint of .* is whole .*step_000002.*step_000001"):
        store.newest_whole()
    assert names_in(tmp_path) == before


HOLDER = """
import sys
from pathlib import Path
from nemo_grpo.tasks import Problem
from nemo_grpo.tasks.jsonl import write_problems
from nemo_grpo.engine.run_folder import RunFolder
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
        save(CheckpointStore(Path("shared")), 1)
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
