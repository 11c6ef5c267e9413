"""``nemo-grpo eval`` with images through the real vLLM, against transformers, on a random Qwen2.5-VL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
TORCHVISION = Path(os.environ.get("TORCHVISION_FOLDER", f"{sys.prefix}/torchvision"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not TORCHVISION.is_dir(),
        reason=f"no {TORCHVISION} (torchvision's Python code): make venv-vllm puts it there",
    ),
]
NUM_TOKENS = 24
SCRIPT = Path(__file__).with_name("vision_model.py")


def python(*arguments):
    """In a process of its own: vLLM has one engine in each."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests/vllm/torchvision_ops", TORCHVISION)))
    command = [sys.executable, "-W", "ignore", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision") / "model"
    python(SCRIPT, "make", folder)
    return folder


def problem(folder, number, question, *colors):
    names = [f"{number}-{i}.png" for i in range(len(colors))]
    for i, (name, color) in enumerate(zip(names, colors, strict=True)):
        Image.new("RGB", (56 + 28 * number, 84 + 28 * i), color).save(folder / name)
    line = {"id": str(number), "question": question, "answer": "1", "metadata": {"images": names}}
    return json.dumps(line) + "\n"


def test_responses_to_images_are_those_of_transformers(model, tmp_path):
    lines = [
        problem(tmp_path, 0, "What?", "red"),
        problem(tmp_path, 1, "What?", "blue"),  # the same prompt tokens, another picture
        problem(tmp_path, 2, "Which of both?", "green", "white"),
    ]
    (tmp_path / "seen.jsonl").write_text("".join(lines))
    python(
        "-m", "nemo_grpo.cli", "eval", "--model", model, "--benchmarks", tmp_path / "seen.jsonl",
        "--task", "vision_counting", "--generator", "vllm", "--k", 1, "--temperature", 0, "--cache-gib", 0.05,
        "--max-tokens", NUM_TOKENS, "--dtype", "float32", "--out", tmp_path / "out",
    )  # fmt: skip
    ours = [json.loads(line) for line in (tmp_path / "out/samples-seen.jsonl").read_text().splitlines()]
    said = python(SCRIPT, "greedy", model, tmp_path / "seen.jsonl", NUM_TOKENS)
    theirs = json.loads(said.splitlines()[-1])
    assert [sample["greedy_completion"] for sample in ours] == theirs
    assert len(set(theirs)) == 3
    assert ours[2]["prompt"].count("<|image_pad|>") == 2


def test_an_export_answers_text_alone_as_transformers_does(model, tmp_path):
    difference = python(SCRIPT, "text", model, tmp_path, NUM_TOKENS).splitlines()[-1]
    assert float(difference) < 1e-5
