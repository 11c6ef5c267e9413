"""The picture of an evaluation."""

import pytest

from nemo_grpo.evaluate.render import plot
from nemo_grpo.support import pictures

MEANS = {"accuracy": 0.25, "greedy": 0.5, "maj@4": 0.75, "pass@4": 1.0}


@pytest.mark.parametrize("names", [["aime24"], ["aime24", "amc23", "math500", "minerva", "olympiadbench"]])
def test_a_score_is_a_slim_bar_however_many_benchmarks(names, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "write_png", lambda figure, path, dpi: drawn.append(figure))
    entry = {"num_problems": 30, "metrics": MEANS, "standard_errors": dict.fromkeys(MEANS, 0.125)}
    summary = {"conditions": {"num_samples": 4}, "benchmarks": dict.fromkeys(names, entry)}
    plot(summary, tmp_path / "scores.png", "model: 4 samples, temperature 1")
    (axes,) = drawn[0].axes
    drawn[0].draw_without_rendering()
    assert [bar.get_height() for bar in axes.patches] == [
        height for height in (25, 50, 75, 100) for _ in names
    ]
    inches = {bar.get_window_extent().width / drawn[0].dpi for bar in axes.patches}
    assert max(inches) < 0.6
    assert [text.get_text() for text in axes.texts] == [
        value for value in ("25.0", "50.0", "75.0", "100.0") for _ in names
    ]
    assert max(text.get_window_extent().y1 for text in axes.texts) <= drawn[0].bbox.y1
    entry["metrics"] = {
        "accuracy": 0.25,
        "greedy": 0.5,
        "maj@1": 0.25,
    }  # of one sample neither votes nor passes
    plot(summary | {"conditions": {"num_samples": 1}}, tmp_path / "scores.png", "x")
    assert [text.get_text() for text in drawn[1].legends[0].get_texts()] == ["avg@1", "greedy"]
