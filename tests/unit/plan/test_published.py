"""The published step times as a regression table: a change of a formula shows here as a larger error."""

from dataclasses import asdict

import pytest

from benchmarks.plan_vs_published import fit, seen_by_gpu
from benchmarks.published_rows import FOLDER, error, read_blind, read_rows
from nemo_grpo.plan.hardware import FITTED, OTHER, PUBLISHED

ROWS = read_rows()


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.gpu == "h100"], ids=lambda row: f"{row.name} {row.source}"
)
def test_published_step_is_predicted(row):
    assert abs(error(row, row.predict(FITTED))) < 0.25


@pytest.mark.slow
def test_constants_are_those_of_the_fit():
    again = fit([row for row in ROWS if row.gpu == "h100"])
    assert asdict(again) == {name: pytest.approx(value, rel=0.02) for name, value in asdict(FITTED).items()}


@pytest.mark.slow
def test_intervals_are_those_of_models_that_the_fit_has_not_seen():
    kept = PUBLISHED | {"other": OTHER}
    found = seen_by_gpu(ROWS)
    assert found.keys() == kept.keys()
    for gpu, seen in found.items():
        for name, value in asdict(kept[gpu]).items():
            assert name == "what" or value == pytest.approx(getattr(seen, name), abs=0.006), (gpu, name)


@pytest.mark.parametrize(("gpu", "num_steps"), [("h100", 17), ("gb200", 10)])
def test_interval_holds_the_share_of_blind_steps_that_it_states(gpu, num_steps):
    """NeMo-RL's steps that no constant has seen."""
    files = ("others.csv", "nemo_rl_0.7.csv")
    rows = [row for name in files for row in read_blind(FOLDER / name)[0] if row.gpu == gpu]
    held = [
        low <= row.published["step"] <= high
        for row in rows
        if row.source.startswith("NeMo-RL")
        for low, high in [PUBLISHED[gpu].around(row.predict(FITTED).seconds)]
    ]
    assert len(held) == num_steps
    assert sum(held) / len(held) >= PUBLISHED[gpu].covered
