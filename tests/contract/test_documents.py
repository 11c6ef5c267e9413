"""What the documents show works: commands parse, make targets exist, links lead somewhere, Python runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer

from nemo_grpo.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`((?:nemo-grpo|make|python) [^`]+)`")
LINK = re.compile(r"\[[^]]*\]\(([^)#\s]*)(#[^)\s]*)?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def by_name(path: Path) -> str:
    return path.name


def blocks(document: Path, language: str) -> list[str]:
    """Code blocks in this language, without their indentation."""
    found = BLOCK.finditer(document.read_text(encoding="utf-8"))
    return [re.sub(f"^{m[1]}", "", m[3], flags=re.MULTILINE) for m in found if m[2] == language]


def commands(document: Path) -> Iterator[list[str]]:
    """Every command line, in blocks and within sentences, as words."""
    text = document.read_text(encoding="utf-8")
    lines = [
        line for language in ("", "bash") for block in blocks(document, language) for line in joined(block)
    ]
    for line in [*lines, *(re.sub(r"\s+", " ", span) for span in SPAN.findall(text))]:
        try:
            words = shlex.split(line.removeprefix("$ "), comments=True)
        except ValueError:
            continue  # output, such as a drawing
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words and Path(words[0]).name in ("nemo-grpo", "make"):
            yield [Path(words[0]).name, *words[1:]]


def joined(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_every_command_parses(document: Path) -> None:
    root = typer.main.get_command(app)
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, *words in commands(document):
        if name == "make":
            assert {word for word in words if "=" not in word} <= targets, (name, words)
            continue
        if not words or "..." in words:
            continue
        command = root
        while words and (below := getattr(command, "commands", {}).get(words[0])):
            command = below
            words.pop(0)
        parts = [command, *getattr(command, "commands", {}).values()]  # a group may have a command of its own
        options = {option for part in parts for parameter in part.params for option in parameter.opts}
        for word in words:
            if word.startswith("-") and not re.fullmatch(r"-[\d.]+", word):
                assert word.partition("=")[0] in options, f"{command.name} has no {word}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        path = (document.parent / target).resolve() if target else document
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor[1:] in {anchor_of(title) for title in HEADING.findall(path.read_text())}, anchor


def anchor_of(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_the_library_example_adds_up_to_the_gradient_of_the_whole_step() -> None:
    (code,) = blocks(ROOT / "docs/library.md", "python")
    torch.manual_seed(0)
    logprobs = -torch.rand(8, 5)
    weights = torch.zeros(8, 5, requires_grad=True)
    given = {
        "scored": logprobs,
        "reference": logprobs - 0.1 * torch.rand(8, 5),
        "sampled": logprobs,
        "token_mask": torch.ones(8, 5),
        "rewards": torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
        "prompt_numbers": torch.arange(8) // 4,
        "policy": lambda rows: logprobs[rows] + weights[rows],
    }
    gradients = []
    for split in ([torch.arange(8)], [torch.arange(3), torch.arange(3, 8)]):
        weights.grad = None
        exec(code, {**given, "microbatches": split})
        gradients.append(weights.grad)
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(*gradients)
