"""What the documents show works: commands parse, make targets exist, links lead somewhere, Python runs."""

import os
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer

from nemo_grpo.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`((?:nemo-grpo|make|python) [^`]+)`")
PYTHON = re.compile(r"(?:[\s`]|/)python (-m [\w.]+|\w+/[\w/]+\.py)([^`|#\n]*)")
LINK = re.compile(r"\[[^]]*\]\(([^)#\s]*)(#[^)\s]*)?\)")
FIRST = re.compile(r"^[^#\n].*$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


PROGRAMS = {
    *("nemo-grpo", "make", "python", "pip", "sbatch", "srun", "bash", "git", "hf", "lm_eval", "pre-commit"),
    *("export", "until"),
}
"""First words of a shell block's lines."""
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
SBATCH_OPTIONS = {"--nodes", "--time", "--gpus-per-node", "--partition", "--array", "--account", "--signal"}
"""Those of Slurm's that the documents use."""


def blocks(document, language):
    """Code blocks in this language, without their indentation."""
    found = BLOCK.finditer(document.read_text(encoding="utf-8"))
    return [re.sub(f"^{m[1]}", "", m[3], flags=re.MULTILINE) for m in found if m[2] == language]


def commands(document):
    """Every command line, in blocks and within sentences, as words; the first is the program's name."""
    text = document.read_text(encoding="utf-8")
    lines = [line for block in shell_blocks(document) for line in joined(block)]
    for line in [*lines, *(re.sub(r"\s+", " ", span) for span in SPAN.findall(text))]:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and ASSIGNMENT.fullmatch(words[0]):
            words.pop(0)
        if words:
            yield [Path(words[0]).name, *words[1:]]


def shell_blocks(document):
    """Blocks of bash, and those without a language whose first line is a command."""
    plain = (block for block in blocks(document, "") if begins_with_a_program(FIRST.search(block)[0]))
    return [*blocks(document, "bash"), *plain]


def begins_with_a_program(line):
    words = [word for word in line.split() if not ASSIGNMENT.fullmatch(word)]
    return bool(words) and Path(words[0]).name in PROGRAMS


def joined(block):
    return block.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_line_of_a_shell_block_is_a_command_or_a_comment(document):
    for block in shell_blocks(document):
        for line in joined(block):
            code, _, comment = line.partition(" # ")
            assert not code.strip() or code.lstrip().startswith("#") or begins_with_a_program(code), line
            swallowed = re.search(r"\b(nemo-grpo|sbatch|srun|pip install|make) [\w-]", comment)
            assert swallowed is None, f"a command stands behind a #: {line}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_parses(document):
    root = typer.main.get_command(app)
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for name, *words in commands(document):
        if name == "make":
            assert {word for word in words if "=" not in word} <= targets, (name, words)
            continue
        if name == "sbatch":
            check_sbatch(words)
        if name == "pip":
            check_extras(words)
        if name != "nemo-grpo" or not words or "..." in words:
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


def python_programs():
    """Modules and scripts that the documents and the benchmarks' results run -> options that they give."""
    found = {}
    for document in [*DOCUMENTS, *(ROOT / "benchmarks" / "results").glob("*.md")]:
        text = document.read_text(encoding="utf-8").replace("\\\n", " ")
        assert not re.search(r"PYTHONPATH=\S+ \S*python", text), "it would not run as it stands"
        for program, rest in PYTHON.findall(text):
            words = rest.split()
            if program == "-m checkpoints_conv" and words:
                program = f"{program} {words[0]}"
            options = {word.partition("=")[0].strip("[]") for word in words if word.startswith(("--", "[--"))}
            found.setdefault(program, set()).update(options)
    found.pop("-m pip", None)
    return found


PYTHON_PROGRAMS = python_programs()


@pytest.mark.parametrize("program", PYTHON_PROGRAMS)
def test_python_program_starts_as_it_is_written_and_has_its_options(program, monkeypatch, capsys):
    """In this process, which pays for the imports once."""
    if "run_grpo" in program:  # runs where NeMo-RL does
        pytest.importorskip("ray")
    *module, name = program.removeprefix("-m ").split()
    monkeypatch.setattr(sys, "argv", [name, "--help"] if not module else [module[0], name, "--help"])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(ROOT)
    run, first = (runpy.run_module if program.startswith("-m ") else runpy.run_path), (*module, name)[0]
    monkeypatch.delitem(sys.modules, first, raising=False)
    with pytest.raises(SystemExit) as ended:
        run(first, run_name="__main__")
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert {option for option in PYTHON_PROGRAMS[program] if option not in shown} == set()


def check_sbatch(words):
    """Options that Slurm has, then one of our scripts."""
    options = [word.partition("=")[0] for word in words[: next(i for i, w in enumerate(words) if "/" in w)]]
    assert set(options) <= SBATCH_OPTIONS, options
    assert (ROOT / words[len(options)]).is_file(), words


def check_extras(words):
    """The extras of this package that pip is told to install."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        for extra in re.findall(r"nemo-grpo\[([\w,]+)\]", word):
            assert set(extra.split(",")) <= set(known), word


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    for target, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        path = (document.parent / target).resolve() if target else document
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            titles = HEADING.findall(path.read_text())
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor[1:] in anchors, anchor


def test_the_picture_of_the_whole_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs/overview.py"))["picture"]()
    assert (ROOT / "docs/overview.svg").read_text() == drawn


def test_the_library_example_adds_up_to_the_gradient_of_the_whole_step():
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
