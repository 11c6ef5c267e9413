"""Pickles that are read in a child first: what the parent holds does not decide."""

import gc
import os
import pickle

from checkpoints_conv.formats.pickles import load_guarded


class BoundToThreads:
    """Garbage that can be freed in the process that made it, and aborts any other."""

    def __init__(self) -> None:
        self.itself, self.home = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.home:
            os.abort()


def test_the_parents_garbage_is_not_freed_in_the_child(tmp_path):
    path, before = tmp_path / "pickle", gc.get_threshold()
    path.write_bytes(pickle.dumps([[number] for number in range(10_000)]))
    gc.collect()
    gc.set_threshold(5_000)  # which the pickle reaches, in the child first, and nothing before it
    try:
        BoundToThreads()
        assert load_guarded(path, {})[99] == [99]
    finally:
        gc.set_threshold(*before)
