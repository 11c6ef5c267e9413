"""SmolLM2-135M-Instruct: its folder, and word problems as its prompts; make targets install its weights."""

import subprocess
import sys
from pathlib import Path

from nemo_grpo.support.hf_folder import load_tokenizer
from nemo_grpo.tasks import Prompt, encode_prompt, parse_task

ROOT = Path(__file__).parents[1]
TASK = parse_task({"name": "word_problems"}).build()


def model_folder() -> Path:
    """The Hugging Face folder; written if it is not there."""
    target = ROOT / ".cache/smollm2"
    command = [sys.executable, "-m", "nemo_grpo.data.smollm2", target]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return target


def prompts_of(folder: Path, number: int) -> list[list[int]]:
    tokenizer = load_tokenizer(folder)
    return [encode_prompt(tokenizer, Prompt(), TASK.train_problem(index, 0)) for index in range(number)]
