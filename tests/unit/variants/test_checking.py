"""Wrong losses, each found by the check that is there for it, with a sentence that says how to repair it."""

import re
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_grpo import UserError
from nemo_grpo.cli import app
from nemo_grpo.variants import checking, parse_loss_fn
from nemo_grpo.variants.checking import check_variant, try_out

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tests/contract"))
from test_documents import blocks  # noqa: E402

HEAD = """
import torch
from typing import ClassVar
from nemo_grpo.core.objective import Shaped, TokenTerms
from nemo_grpo.variants.base import RatioConfig

class Mine(RatioConfig):
    '''GRPO, with one mistake.'''
"""
TERMS = "\n    def terms(self, prepared):\n        batch, a = prepared.batch, prepared.advantages\n"
SHAPE = "\n    def shape(self, batch, seed):\n        shaped = super().shape(batch, seed)\n"


def term(policy: str, before: str = "") -> str:
    """A method that gives this policy term."""
    return f"{TERMS}        {before}\n        return TokenTerms({policy})"


def shape(advantages: str, before: str = "") -> str:
    """A method that gives these advantages."""
    return f"{SHAPE}        {before}\n        return Shaped({advantages}, shaped.base)"


TERM = "self.ratio(batch) * a"
OUTLIER = """r, n = batch.rewards.double(), (batch.group_ids[:, None] == batch.group_ids).sum(1)
        same = (batch.group_ids[:, None] == batch.group_ids).double()
        others = (n - 1).clamp(min=1)
        mean = (same @ r - r) / others
        std = ((same @ r**2 - r**2) / others - mean**2).clamp(min=0).sqrt()
        a = (r - mean) / torch.where(std > 0, std, 1.0)
        a = torch.where(batch.mask, a[:, None], 0.0).to(shaped.advantages.dtype)"""
RUNNING = "global mean; mean = 0.9 * globals().get('mean', 0.0) + 0.1 * float(batch.rewards.mean())"
HOOK = "x = batch.next_token_logprobs; x.register_hook(lambda g: 2 * g) if x.requires_grad else None"
WRONG = {
    "a mean over rows": (
        term(f"{TERM} / len(a)"),
        *("microbatches", "found the loss .*terms.. must treat every row by itself: .* belongs into shape"),
    ),
    "a group by its place": (
        shape("a", "a = shaped.advantages.clone(); a[0] = 2 * a[0]"),
        *("order", "find a response.s group by batch.group_ids, not by its place"),
    ),
    "the width of the tensor": (
        term(f"{TERM} / a.shape[1]"),
        *("padding", "count tokens by batch.mask, not by the width"),
    ),
    "a term per response": (
        term(f"({TERM}).sum(1, keepdim=True)"),
        *("shapes", r"TokenTerms.policy of shape \[5, 4\].*found \[5, 1\].*expand_as"),
    ),
    "draws of their own": (
        shape("shaped.advantages * torch.rand(())"),
        *("repetition", "same from the same step; found.*draw by core.random.token_uniforms"),
    ),
    "a running mean in a global": (
        shape("shaped.advantages * (1 + mean)", RUNNING),
        *("repetition", "keep nothing between calls, .* on self, .*Shaped.carried hands numbers to the next"),
    ),
    "a tensor that is changed in place": (
        term(TERM, "a.mul_(2)"),
        *("repetition", "change no tensor in place"),
    ),
    "a minus sign": (
        term(f"-{TERM}"),
        *("sign", r"an update raises the tokens of responses with an advantage > 0; found the opposite \(-"),
    ),
    "a size without a sign": (
        term(f"{TERM}.abs()"),
        *("sign", r"an update lowers the tokens of .* < 0; .* minus sign, an abs\(\) or exp\(prev - next\)"),
    ),
    "a variance by subtraction": (
        shape("a", OUTLIER),
        *("finite", "one outlier per group; found that group . has an advantage of .* a spread near 0"),
    ),
    "no gradient": (
        term("self.ratio(batch).detach() * a"),
        *("gradient", "found no gradient at any token.*without detach"),
    ),
    "a gradient that is no derivative": (
        term(TERM, HOOK),
        *("differences", "found another one; look for .data, a hook"),
    ),
    "not finite": (
        term("torch.exp(batch.next_token_logprobs - batch.prev_logprobs) * a"),
        *("finite", "the policy 100 nats above the scored one; found the loss .*importance_ratio"),
    ),
    "a std of 0": (
        shape("torch.where(batch.mask, shaped.advantages / batch.rewards.std(), 0.0)"),
        *("finite", "found advantages that are not; add an eps"),
    ),
    "advantages in float64": (
        shape("shaped.advantages.double()"),
        *("precision", "expected float32 for a float32 step; found .*float64"),
    ),
    "a misspelt attribute of the batch": (
        term("batch.next_token_logprob * a"),
        *("shapes", r"next_token_logprob. \(wrong.py:\d+\); did you mean .next_token_logprobs"),
    ),
    "a misspelt declaration": (
        "    need_entropy: ClassVar[bool] = True\n",
        *("names", "found need_entropy, which nothing does; did you mean needs_entropy"),
    ),
    "entropies that are not declared": (
        shape("shaped.advantages * batch.entropies.exp()"),
        *("shapes", "it reads entropies, which are given with needs_entropy = True only"),
    ),
    "a metric of the microbatch": (
        term(f"{TERM}, None, {{'mine/max': a.amax()}}"),
        *("shapes", "expected the metric mine/max of shape"),
    ),
    "advantages of masked tokens": (
        shape("shaped.advantages + 1"),
        *("shapes", "expected advantages of exactly 0 outside batch.mask"),
    ),
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def loss(text: str) -> str:
    Path("wrong.py").write_text(HEAD + text + "\n")
    return "wrong.py:Mine"


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_loss_is_found_with_its_remedy(what):
    text, check, sentence = WRONG[what]
    config = parse_loss_fn({"variant": loss(text)})
    found = dict(check_variant(config, quick=True))
    assert check in found, found
    assert re.search(sentence, found[check]), found[check]
    assert check != "repetition" or list(found) == [check]
    with pytest.raises(UserError, match=r"`nemo-grpo variants check wrong\.py:Mine`"):
        try_out(config, "loss_fn.variant")


@pytest.mark.parametrize(
    "stopped", ["self.ratio(batch).detach()", "self.ratio(batch).data", "self.held(batch)"]
)
def test_a_stop_gradient_is_held_however_it_is_written(stopped):
    head = "    def held(self, batch):\n        with torch.no_grad():\n            return self.ratio(batch)\n"
    policy = f"{stopped} * a * batch.next_token_logprobs"
    assert check_variant(parse_loss_fn({"variant": loss(head + term(policy))}), quick=True) == []
    failures = check_variant(parse_loss_fn({"variant": loss(head + term(policy, HOOK))}), quick=True)
    assert [found.check for found in failures] == ["differences"]


ONE_LINE = {
    "    punishment: float = 'half'": "loss_fn.punishment='half' (the default of wrong.py:Mine)",
    "    punishment: float": "punishment is missing; wrong.py:Mine has no default",
    "    weights: torch.Tensor = torch.ones(3)": "schema for <class 'torch.Tensor'> (wrong.py:7)",
    "    k: float = 1.0\n" + SHAPE + "        self.k = 2.0": (
        "k: Instance is frozen (wrong.py:13); a variant keeps nothing on self; Shaped.carried"
    ),
    "    need_entropy = True": (
        "need_entropy is nothing that a variant has; did you mean 'needs_entropy'?; remove it, or write a "
        "parameter as `need_entropy: type = value` (wrong.py:7)"
    ),
}
"""Mistakes in the class -> what is said of them."""


@pytest.mark.parametrize("text", ONE_LINE)
def test_a_mistake_in_the_class_is_told_in_one_line_without_an_address(text):
    done = CliRunner().invoke(app, ["variants", "check", loss(text)])
    lines = (done.output + str(done.exception or "")).splitlines()
    said = [line for line in lines if line[:2] not in ("ok", "no") and line != "1"]  # 1: the exit code
    assert len(said) == 1, said
    assert ONE_LINE[text] in said[0], said[0]
    assert "pydantic.dev" not in said[0]
    assert done.exit_code != 0


def test_a_right_loss_passes():
    assert check_variant(parse_loss_fn({"variant": loss("    pass")})) == []


def test_the_quick_checks_take_less_than_a_second():
    config = parse_loss_fn({"variant": loss("    pass")})
    start = time.process_time()
    try_out(config, "loss_fn.variant")
    assert time.process_time() - start < 1  # CPU time; about 0.05


def test_the_command_lists_every_check_and_fails_with_1():
    run = lambda *line: CliRunner().invoke(app, ["variants", "check", *line])  # noqa: E731
    right = run("tr_grpo", "weighting=reverse")
    assert (right.exit_code, right.output.count("ok ")) == (0, 16), right.output
    assert "has     folds = True: NeMo-RL's data plane, which brings" in run("dr_grpo").output
    assert "could" not in run("dr_grpo").output
    undeclared = run(loss("    def terms(self, prepared):\n        return super().terms(prepared)"))
    assert "could   declare reads_scores = False in its class" in undeclared.output
    assert "could   declare folds = True" in undeclared.output
    wrong = run(loss(WRONG["a mean over rows"][0]))
    assert wrong.exit_code == 1
    assert "failed  microbatches: expected the same in one piece and as 5 microbatches" in wrong.output
    assert "ok      order" in wrong.output
    ended = run(loss(WRONG["no gradient"][0])).output
    assert "not run finite" in ended
    assert ended.count("ok ") == 3, "nothing after the first checks ran"
    assert "did you mean" in str(run("tr_grpo", "alfa=1").exception)
    assert "wrong.py names a file and no class; write wrong.py:My" in str(run("wrong.py").exception)


@pytest.mark.parametrize("command", [["train"], ["compare"], ["recipe", "check"]], ids=" ".join)
def test_commands_try_an_own_loss_before_anything_else(command):
    name = loss(WRONG["no gradient"][0])
    line = [*command, "quickstart", f"loss_fn.variant={name}"]
    if command == ["compare"]:
        line = [*line[:-1], "--variants", name]
    done = CliRunner().invoke(app, line)
    said = done.output + str(done.exception)
    assert "gradient: expected that the loss of a step whose rewards differ moves the policy" in said
    assert not Path("runs").exists()


def test_a_run_is_refused_with_two_failures_and_their_number(monkeypatch):
    monkeypatch.setattr(checking, "check_variant", lambda _config, quick: [*zip("abc", "123", strict=True)])
    with pytest.raises(UserError, match=r"loss_fn\.variant=gpg: a: 1; b: 2 \(3 checks fail\); try `nemo-"):
        try_out(parse_loss_fn({"variant": "gpg"}), "loss_fn.variant")


@pytest.mark.parametrize(
    "name", ["my_loss.py:Lenient", "my_losses.py:HalfWay", "my_losses.py:Bounded", "my_losses.py:Detached"]
)
def test_a_loss_of_the_page_passes_every_check(name):
    file = name.partition(":")[0]
    (text,) = (block for block in blocks(ROOT / "docs/own.md", "python") if block.startswith(f"# {file}\n"))
    Path(file).write_text(text)
    assert check_variant(parse_loss_fn({"variant": name}), quick=True) == []
