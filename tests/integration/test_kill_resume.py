"""A run that is killed again and again, half of the times while it saves, ends like an unbroken one.

The runs are those of benchmarks/kill_resume.py, in a process of its own: it forks, which needs a process that
has computed nothing yet.
"""

import json

import pytest
from processes import PATIENCE, ROOT, python

NUM_KILLS = {"sync": 20, "async": 8}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=NUM_KILLS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, kind):
    folder = tmp_path_factory.mktemp("kills")
    options = ["--seed", 1, "--kills", NUM_KILLS[kind], "--inside", 1, "--folder", folder]
    options += ["--async-save"] if kind == "async" else []
    process = python(ROOT / "benchmarks/kill_resume.py", *options, "--json", folder / "outcome.json")
    said, _ = process.communicate(timeout=PATIENCE)
    assert (folder / "outcome.json").exists(), said[-4000:]
    return json.loads((folder / "outcome.json").read_text())


def test_every_kill_is_followed_by_a_resume_from_the_newest_complete_checkpoint(outcome, kind):
    # A start that fails, a half or lost checkpoint, and stale leftovers end the command without an outcome.
    assert outcome["kills"] == NUM_KILLS[kind]
    assert outcome["resumed"] > 0


def test_some_kills_land_inside_a_save(outcome):
    assert outcome["inside_save"] > 0


def test_killed_runs_end_bit_equal_to_an_unbroken_one(outcome):
    assert outcome["runs"] > 0
    assert outcome["different"] == []


def test_no_process_outlives_a_killed_run(outcome):
    assert outcome["writers_left"] == 0
