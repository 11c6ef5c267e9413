"""Averages over benchmarks and their table, by hand."""

import io
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console
from test_runner import PROBLEMS, SAMPLING, SCRIPT, CharacterTokenizer, ScriptedGenerator

from nemo_grpo.evaluate.benchmarks import Benchmark
from nemo_grpo.evaluate.config import EvalConfig
from nemo_grpo.evaluate.render import groups, plot, table
from nemo_grpo.evaluate.suite import Suite, longest_prompt
from nemo_grpo.evaluate.summary import over_seeds
from nemo_grpo.support import pictures
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Prompt, parse_task

CONFIG = EvalConfig(
    Path("model"),
    num_samples=4,
    temperature=0.7,
    top_p=0.9,
    max_tokens=100,
    stop_token_ids=(0,),
    batch_size=8,
)
CONDITIONS = {
    **{"model": "f", "generator": "hf", "dtype": "float32", "device": "cpu"},
    **{"sampling": asdict(SAMPLING), "num_samples": 4, "seed": 7},
}


def benchmark(name, problems):
    task = parse_task({"name": "knights_knaves"}).build()
    return Benchmark(name, task, problems, Prompt(), "none", path=Path(f"{name}.jsonl"), digest="d")


@pytest.fixture
def evaluated(tmp_path):
    """Results on benchmarks: problems by name."""

    def results(**sets):
        chosen = [benchmark(name, problems) for name, problems in sets.items()]
        generator, tokenizer = ScriptedGenerator(SCRIPT), CharacterTokenizer()
        suite = Suite(CONFIG, CONDITIONS, tokenizer, chosen, tmp_path)
        return suite.run(generator, CONDITIONS["seed"])

    return results


@pytest.fixture
def result(evaluated):
    return evaluated(all=PROBLEMS, one=PROBLEMS[:1])


def test_average_by_hand(evaluated):
    # "all": accuracies 1/2, 1/4, 0; "two": 1/2, 1/4. Greedy 1, 0, 0 and 1, 0. Errors over problems.
    result = evaluated(all=PROBLEMS, two=PROBLEMS[:2])
    metrics, errors = result.to_dict()["average"].values()
    assert metrics["accuracy"] == pytest.approx((1 / 4 + 3 / 8) / 2)
    assert errors["accuracy"] == pytest.approx(math.sqrt(1 / 48 + 1 / 64) / 2)
    assert metrics["greedy"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert errors["greedy"] == pytest.approx(math.sqrt(1 / 9 + 1 / 4) / 2)
    # samples of the problems: 2, 1, 0 of 4 right; variances 1/3, 1/4, 0, each over 4 samples
    runs = math.sqrt((1 / 3 + 1 / 4) / 4) / 3
    assert result.results["all"].standard_errors()["accuracy_runs"] == pytest.approx(runs)
    assert errors["accuracy_runs"] == pytest.approx(math.sqrt(runs**2 + (1.5 * runs) ** 2) / 2)


def test_mean_and_deviation_over_seeds_by_hand(result):
    def shifted(by):
        summary = {"model": "m", **result.to_dict()}
        for entry in summary["benchmarks"].values():
            entry["metrics"] = {name: value + by for name, value in entry["metrics"].items()}
        return summary

    joined = over_seeds({3: shifted(0.0), 5: shifted(0.1), 9: shifted(0.5)})
    # "all" has 1/4: deviations -0.2, -0.1, 0.3 from the mean 0.2 of the shifts; variance 0.14 / 2
    entry = joined["benchmarks"]["all"]
    assert entry["metrics"]["accuracy"] == pytest.approx(1 / 4 + 0.2)
    assert entry["standard_deviations"]["accuracy"] == pytest.approx(math.sqrt(0.07))
    assert entry["standard_errors"]["accuracy"] == pytest.approx(math.sqrt(1 / 48))
    assert joined["average"]["metrics"]["accuracy"] == pytest.approx(3 / 8 + 0.2)
    assert joined["average"]["standard_deviations"]["accuracy"] == pytest.approx(math.sqrt(0.07))
    assert joined["seeds"] == [3, 5, 9]
    assert entry["by_seed"]["5"]["accuracy"] == pytest.approx(1 / 4 + 0.1)


def test_table_shows_per_cent_with_errors(result):
    console = Console(file=io.StringIO(), width=120)
    console.print(table(result.to_dict()))
    shown = console.file.getvalue()
    rows = {row.split("│")[1].strip(): row for row in shown.splitlines() if row.startswith("│")}
    assert "25.0 +- 14.4" in rows["avg@4"]
    assert "| 50.0 | 37.5 |" in " ".join(rows["avg@4"].replace("│", "|").split())  # of one problem no error
    assert "12.7" in rows["+- of runs"]
    assert {"pass@2", "pass@4", "maj@4"} <= set(rows)
    assert "3 problems" in shown


def test_puzzles_are_also_counted_by_size(evaluated):
    sizes = (2, 3, 2)
    problems = [replace(p, metadata={"num_people": n}) for p, n in zip(PROBLEMS, sizes, strict=True)]
    result = evaluated(kk=problems)
    # accuracies 1/2 and 0 with 2 people, 1/4 with 3; greedy 1 and 0, and 0
    assert result.groups("kk") == {
        "num_people=2": {"accuracy": 0.25, "greedy": 0.5, "num_problems": 2},
        "num_people=3": {"accuracy": 0.25, "greedy": 0.0, "num_problems": 1},
    }
    assert groups(result.to_dict()) == ["kk, avg@4: num_people=2 25.0, num_people=3 25.0"]


def test_responses_to_an_open_think_block_are_read_as_such():
    task = parse_task({"name": "math"}).build()
    for prefix, is_open in (("<think>\n", True), ("Think in <think> tags.", False)):
        prompt = Prompt(use_chat_template=False, response_prefix=prefix)
        asked = Benchmark("math", task, PROBLEMS, prompt, "none", path=Path("math.jsonl"))
        assert asked.as_prompted(CharacterTokenizer()).config.think_is_open == is_open


def test_a_prompt_that_does_not_fit_is_named():
    asked = [benchmark("all", PROBLEMS)], CharacterTokenizer(), Path("none")
    assert longest_prompt(*asked, 10, 15) == len("[Q0?]")
    with pytest.raises(UserError, match="has 5 tokens and --max-tokens is 11: use --max-tokens 10 or less"):
        longest_prompt(*asked, 11, 15)
    with pytest.raises(UserError, match="has 5 tokens, which leaves no room for a response"):
        longest_prompt(*asked, 11, 5)  # no --max-tokens helps


@pytest.mark.parametrize("names", [["aime24"], ["aime24", "amc23", "math500", "minerva", "olympiadbench"]])
def test_a_score_is_a_slim_bar_however_many_benchmarks(names, tmp_path, monkeypatch):
    drawn, means = [], {"accuracy": 0.25, "greedy": 0.5, "maj@4": 0.75, "pass@4": 1.0}
    monkeypatch.setattr(pictures, "write_png", lambda figure, path, dpi: drawn.append(figure))
    entry = {"num_problems": 30, "metrics": means, "standard_errors": dict.fromkeys(means, 0.125)}
    summary = {"conditions": {"num_samples": 4}, "benchmarks": dict.fromkeys(names, entry)}
    plot(summary, tmp_path / "scores.png", "model: 4 samples, temperature 1")
    (axes,) = drawn[0].axes
    drawn[0].draw_without_rendering()
    assert [bar.get_height() for bar in axes.patches] == [v for v in (25, 50, 75, 100) for _ in names]
    inches = {bar.get_window_extent().width / drawn[0].dpi for bar in axes.patches}
    assert max(inches) < 0.6
    assert [text.get_text() for text in axes.texts] == [f"{v}.0" for v in (25, 50, 75, 100) for _ in names]
    assert max(text.get_window_extent().y1 for text in axes.texts) <= drawn[0].bbox.y1
    entry["metrics"] = {"accuracy": 0.25, "greedy": 0.5, "maj@1": 0.25}  # one sample neither votes nor passes
    plot(summary | {"conditions": {"num_samples": 1}}, tmp_path / "scores.png", "x")
    assert [text.get_text() for text in drawn[1].legends[0].get_texts()] == ["avg@1", "greedy"]
