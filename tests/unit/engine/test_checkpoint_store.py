"""Checkpoints are whole or not there, on any disk."""

import errno
import shutil
from pathlib import Path

import pytest

from nemo_grpo import UserError
from nemo_grpo.engine.checkpoint_store import CheckpointStore
from nemo_grpo.run.folder import checkpoints_in, step_of

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
