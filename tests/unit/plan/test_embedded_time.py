"""The embedded engine's step on a CPU against numbers worked out by hand, and against measured runs."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result
from unit.plan.toys import MATRICES, PARAMETERS, SETUP, SMALL, WORK

from benchmarks.plan_vs_this_machine import Row, fitted_without, read_rows, seen_by_size
from nemo_grpo.cli import app
from nemo_grpo.errors import UserError
from nemo_grpo.plan import machine, plan_recipe
from nemo_grpo.plan.efficiency import LOCAL, Local
from nemo_grpo.plan.embedded_time import Rank, embedded_step
from nemo_grpo.plan.interval import MEASURED
from nemo_grpo.plan.machine import Machine, measure
from nemo_grpo.plan.memory import local_layer_bytes
from nemo_grpo.recipe import load_recipe
from nemo_grpo.sampling.decoder import matrices

RECIPES = Path(__file__).parents[3] / "recipes"
ROWS = read_rows()

CPU = Machine(
    memory_bytes=16e9,
    forward=((1, 1e6),),
    sampling=((1, 5e6),),
    backward=2e6,
    memory=1e5,
    attention=1e4,
    cache=2e4,
    operation=1e-3,
)
FREE = Local(moved=0.0, logits=0.0, decode=0.0, train=0.0, sample=0.0)
"""Nothing but products, attention, the cache, and weights that are moved."""

HERE = replace(SETUP, embedded=True, precision_bytes=4, grad_bytes=4, train_tokens=56, vllm_max_sequences=8)
RANK = Rank(SMALL, HERE, CPU, FREE)


def phases(eff: Local = FREE, **changes: object) -> dict[str, float]:
    return embedded_step(SMALL, replace(HERE, **changes), WORK, CPU, eff).phases  # type: ignore[arg-type]


def test_rates_lie_between_those_measured() -> None:
    cpu = replace(CPU, forward=((1, 10.0), (100, 1000.0)))
    # 10 is half way from 1 to 100 in its logarithm
    assert cpu.rate(10) == pytest.approx(505)
    assert cpu.rate(10, sampling=True) == 5e6
    assert (cpu.rate(0.5), cpu.rate(1), cpu.rate(100), cpu.rate(1e9)) == (10, 10, 1000, 1000)


def test_a_decoding_step_computes_products_and_reads_the_cache() -> None:
    # 3 responses that hold 10 tokens: keys and values 3 x 10 x 2 x 4 columns x 4 bytes per layer; the output
    # matrix; drawing from 100 logits
    layer = 2 * MATRICES * 3 / 5e6 + 960 / 2e4
    assert RANK.iteration(3, 10) == pytest.approx(4 * layer + 2 * 3 * 800 / 5e6 + 3 * 100 * 40 / 1e5)
    slow = replace(RANK, eff=replace(FREE, decode=5.0))
    assert slow.iteration(3, 10) - RANK.iteration(3, 10) == pytest.approx(4 * 5 * 1e-3)


def test_rollout_reads_each_prompt_once_and_ends_with_the_longest() -> None:
    found = phases()
    # 2 prompts of 4 tokens; attention 4 x 8 x (2 x 16 / 2) per layer; logits of 2 tokens
    layer = 2 * MATRICES * 8 / 5e6 + 4 * 8 * 16 / 1e4
    assert found["prefill"] == pytest.approx(4 * layer + 2 * 2 * 800 / 5e6 + 2 * 100 * 40 / 1e5)
    # 8 responses of 6 tokens at 4 + 3 in the cache
    assert found["decode"] + found["tail"] == pytest.approx(6 * RANK.iteration(8, 7))
    # in batches of 4, twice as often
    halved = phases(vllm_max_sequences=4)
    assert halved["decode"] + halved["tail"] == pytest.approx(2 * 6 * RANK.iteration(4, 7))


def test_passes_compute_each_prompt_once() -> None:
    # 2 prompts of 4 and 8 responses of 6 tokens: 56. Attention: 2 x 16 / 2 + 8 x 6 x 10 pairs
    attention = 4 * 8 * (16 + 480) / 1e4
    forward = 4 * (2 * MATRICES * 56 / 1e6 + attention) + 2 * 48 * 800 / 1e6
    backward = 4 * (4 * MATRICES * 56 / 2e6 + 2 * attention) + 4 * 48 * 800 / 2e6 + 16 * PARAMETERS / 1e5
    found = phases()
    assert found["scoring"] == pytest.approx(forward)
    assert found["forward and backward"] == pytest.approx(forward + backward)
    # two microbatches fill the gradient buffer twice
    twice = phases(train_tokens=28)
    assert twice["forward and backward"] - found["forward and backward"] == pytest.approx(
        16 * PARAMETERS / 1e5
    )
    assert phases(recompute=("full",))["forward and backward"] == pytest.approx(
        forward + backward + 4 * (2 * MATRICES * 56 / 1e6 + attention)
    )


def test_weights_are_moved() -> None:
    found = phases(keeps_reference=True)
    assert found["optimizer"] == pytest.approx(80 * PARAMETERS / 1e5)
    assert found["refit"] == pytest.approx(2 * 4 * PARAMETERS / 1e5)
    # the policy's weights are kept, the reference's come, the policy's come back: each read and written
    assert found["swaps to the host"] == pytest.approx(6 * 4 * PARAMETERS / 1e5)
    assert phases()["swaps to the host"] == 0
    assert phases(precision_bytes=2)["optimizer"] == pytest.approx(84 * PARAMETERS / 1e5)


@pytest.mark.parametrize(
    ("constant", "phase", "seconds"),
    [
        ("sample", "rewards, data, logs", 8 * 1e-3),
        ("train", "scoring", 4 * 1e-3),
        ("train", "forward and backward", 3 * 4 * 1e-3),
        ("moved", "scoring", 4 * 56 * local_layer_bytes(SMALL, HERE) / 1e5),
        ("moved", "forward and backward", 3 * 4 * 56 * local_layer_bytes(SMALL, HERE) / 1e5),
        ("logits", "scoring", 48 * 100 / 1e5),
        ("logits", "forward and backward", 3 * 48 * 100 / 1e5),
    ],
)
def test_each_constant_counts_where_it_belongs(constant: str, phase: str, seconds: float) -> None:
    assert phases(replace(FREE, **{constant: 1.0}))[phase] - phases()[phase] == pytest.approx(seconds)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(("memory", "attention", "cache", "backward", "operation", "forward", "sampling")),
    st.floats(1.1, 4),
    st.sampled_from((16, 56, 200)),
    st.sampled_from(((), ("full",))),
)
def test_a_faster_machine_is_never_slower(
    rate: str, factor: float, tokens: int, recompute: tuple[str, ...]
) -> None:
    setup = replace(HERE, train_tokens=tokens, recompute=recompute)
    value = getattr(CPU, rate)
    if isinstance(value, tuple):
        value = tuple((rows, flops * factor) for rows, flops in value)
    else:
        value = value / factor if rate == "operation" else value * factor
    faster = replace(CPU, **{rate: value})  # type: ignore[arg-type]
    one, other = (embedded_step(SMALL, setup, WORK, cpu, LOCAL).seconds for cpu in (CPU, faster))
    assert other <= one * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from((16, 56, 200)), st.integers(0, 2), st.integers(1, 4))
def test_more_work_is_never_faster(tokens: int, passes: int, times: int) -> None:
    setup, work = replace(HERE, train_tokens=tokens), replace(WORK, scoring_passes=passes)
    kept = embedded_step(SMALL, setup, work, CPU).seconds
    again = embedded_step(SMALL, replace(setup, recompute=("full",)), work, CPU).seconds
    more = embedded_step(SMALL, setup, replace(work, num_samples=8 * times), CPU).seconds
    assert again >= kept
    assert more >= kept * (1 - 1e-9)


def test_this_machine_is_measured() -> None:
    before = torch.get_num_threads()
    found = measure(SMALL, 256)
    assert [rows for rows, _ in found.forward] == [1, 8, 32, 128, 256]
    assert found.sampling == found.forward  # matrices of a few values are not packed
    assert min(found.backward, found.memory, found.attention, found.cache, found.operation) > 0
    assert found.memory_bytes > 2**28
    assert torch.get_num_threads() == before


def test_the_decoders_products_are_measured_where_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "packs", lambda weight: weight.numel() == 16 * SMALL.hidden_size)
    found = measure(replace(SMALL, ffn_size=8), 256)
    assert [rows for rows, _ in found.sampling] == [1, 8, 32, 128, 256]
    assert found.sampling != found.forward


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.size} {row.precision}")
def test_measured_phases_are_predicted(row: Row) -> None:
    """BF16 is not in the fit: its conversions are not counted."""
    off = 0.2 if row.precision == "float32" else 0.3
    for phase, seconds in row.predict(LOCAL).items():
        assert seconds == pytest.approx(row.phases[phase], rel=off), phase


def test_constants_and_errors_are_those_of_the_fit() -> None:
    assert asdict(LOCAL) == pytest.approx(asdict(fitted_without(ROWS, None)), rel=0.01)
    assert asdict(seen_by_size(ROWS)) == {
        name: value if name == "what" else pytest.approx(value, abs=0.006)
        for name, value in asdict(replace(MEASURED, what="")).items()
    }


def plan_here(monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    """The quickstart on this machine, which is as one in the table."""
    monkeypatch.setattr(machine, "measure", lambda *_sizes, **_options: ROWS[0].machine)
    arguments = ["plan", str(RECIPES / "quickstart.yaml"), "--gpu", "this", *options]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_plan_on_this_machine_shows_the_embedded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    result = plan_here(monkeypatch, "--lengths", "35")
    assert result.exit_code == 0
    for part in ("decode", "forward and backward", "5 steps measured on a CPU", " min\n", "1 x 1 this"):
        assert part in result.output
    for part in ("GPU-hours", "pipeline bubble", "more GPUs"):
        assert part not in result.output


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "gpg/gpg-qwen2.5-32b-4n8g.yaml",
            [],
            "target=cluster, and this machine's CPU runs the embedded engine",
        ),
        ("quickstart.yaml", ["cluster.gpus_per_node=2"], "one rank is predicted, and quickstart has 2; use"),
        ("quickstart.yaml", ["nemo_grpo.engine.generator=hf"], "not sampled by the engine's own decoder"),
    ],
)
def test_what_this_machine_cannot_predict_is_refused(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_recipe(load_recipe(RECIPES / name, overrides), "this")


def test_questions_about_gpus_are_not_asked_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    error = plan_here(monkeypatch, "--best").exception
    assert isinstance(error, UserError)
    assert "take one recipe with target=cluster" in str(error)
