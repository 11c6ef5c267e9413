"""Wrong losses, each found by the check that is there for it, with a sentence that says how to repair it."""

import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_grpo import UserError
from nemo_grpo.cli import app
from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.checking import check_variant, runner, try_out

HEAD = """
import torch
from typing import ClassVar
from nemo_grpo.core.objective import Shaped, TokenTerms
from nemo_grpo.variants.base import RatioConfig

class Mine(RatioConfig):
    '''GRPO, with one mistake.'''
    needs_prev_logprobs: ClassVar[bool] = False
"""
TERMS = "\n    def terms(self, prepared):\n        batch, a = prepared.batch, prepared.advantages\n"
SHAPE = "\n    def shape(self, batch, seed):\n        shaped = super().shape(batch, seed)\n"
RETURN = "\n        return TokenTerms(self.ratio(batch) * a)"
WRONG = {
    "a mean over rows": (
        TERMS + "        return TokenTerms(self.ratio(batch) * a / len(a))",
        *("microbatches", "found the loss .*terms.. must treat every row by itself"),
    ),
    "advantages scaled by the microbatch": (
        TERMS + "        a = a / a.abs().amax().clamp(min=1e-9)" + RETURN,
        *("microbatches", "what spans rows, such as a mean over them, belongs into shape"),
    ),
    "a group by its place": (
        "    shapes_advantages: ClassVar[bool] = True\n"
        + SHAPE
        + "        a = shaped.advantages.clone(); a[0] = 2 * a[0]\n        return Shaped(a, shaped.base)",
        *("order", "find a response.s group by batch.group_ids, not by its place"),
    ),
    "the width of the tensor": (
        TERMS + "        return TokenTerms(self.ratio(batch) * a / a.shape[1])",
        *("padding", "count tokens by batch.mask, not by the width"),
    ),
    "a term per response": (
        TERMS + "        return TokenTerms((self.ratio(batch) * a).sum(1, keepdim=True))",
        *("shapes", r"TokenTerms.policy of shape \[5, 4\].*found \[5, 1\].*expand_as"),
    ),
    "a bonus beside the advantages": (
        "    learns_without_advantages: ClassVar[bool] = True\n"
        + TERMS
        + "        return TokenTerms(self.ratio(batch) * (a + 0.1))",
        *("scaling", "expected a policy term proportional to the advantages.*set it to False"),
    ),
    "no gradient": (
        TERMS + "        return TokenTerms(self.ratio(batch).detach() * a)",
        *("gradient", "found no gradient at any token.*without detach"),
    ),
    "a stop-gradient that is not declared": (
        TERMS + "        return TokenTerms(self.ratio(batch).detach() * a * batch.next_token_logprobs)",
        *("differences", "set the class attribute stops_gradient = True"),
    ),
    "a gradient that is no derivative": (
        TERMS
        + "        x = batch.next_token_logprobs\n"
        + "        x.register_hook(lambda g: 2 * g) if x.requires_grad else None"
        + RETURN,
        *("differences", "found another one; look for detach"),
    ),
    "not finite": (
        TERMS + "        return TokenTerms(torch.exp(batch.next_token_logprobs - batch.prev_logprobs) * a)",
        *("finite", "the policy 100 nats above the scored one; found the loss .*importance_ratio"),
    ),
    "a std of 0": (
        "    shapes_advantages: ClassVar[bool] = True\n"
        + SHAPE
        + "        std = batch.rewards.std()\n"
        + "        a = torch.where(batch.mask, shaped.advantages / std, 0.0)\n"
        + "        return Shaped(a, shaped.base)",
        *("finite", "found advantages that are not; add an eps"),
    ),
    "advantages in float64": (
        "    shapes_advantages: ClassVar[bool] = True\n"
        + SHAPE
        + "        return Shaped(shaped.advantages.double(), shaped.base)",
        *("precision", "expected float32 for a float32 step; found .*float64"),
    ),
    "a misspelt attribute of the batch": (
        TERMS + "        return TokenTerms(batch.next_token_logprob * a)",
        *("shapes", r"next_token_logprob. \(wrong.py:\d+\); did you mean .next_token_logprobs"),
    ),
    "a misspelt declaration": (
        "    need_prev_logprobs: ClassVar[bool] = True\n",
        *("names", "found need_prev_logprobs, which nothing does; did you mean needs_prev_logprobs"),
    ),
    "a misspelt method": (
        "\n    def policy_terms(self, ratio, advantages):\n        return ratio * advantages, {}",
        *("names", "found policy_terms, which nothing does; did you mean policy_term"),
    ),
    "entropies that are not declared": (
        "    shapes_advantages: ClassVar[bool] = True\n"
        + SHAPE
        + "        return Shaped(shaped.advantages * batch.entropies.exp(), shaped.base)",
        *("shapes", "it reads entropies, which are given with needs_entropy = True only"),
    ),
    "scores that are not declared": (
        "    shapes_advantages: ClassVar[bool] = True\n"
        + SHAPE
        + "        return Shaped(shaped.advantages * batch.prev_logprobs.exp(), shaped.base)",
        *("scores", "found that it does; set it to True"),
    ),
    "shaping that is not declared": (
        SHAPE + "        return Shaped(shaped.advantages * 2, shaped.base)",
        *("shaping", "as shapes_advantages = False says; found others"),
    ),
    "a statistic of the step that is not declared": (
        "    beyond_groups = property(lambda self: None)\n    shapes_advantages: ClassVar[bool] = True\n"
        + SHAPE
        + "        return Shaped(shaped.advantages * (1 + batch.rewards.mean()), shaped.base)",
        *("groups", "same advantages for a group alone, as beyond_groups = None says"),
    ),
    "an entropy bonus that is not declared": (
        TERMS + "        return TokenTerms(self.ratio(batch) * a - 0.1 * batch.next_token_logprobs)",
        *("rows without advantage", "set the class attribute learns_without_advantages = True"),
    ),
    "a metric of the microbatch": (
        TERMS + "        return TokenTerms(self.ratio(batch) * a, None, {'mine/max': a.amax()})",
        *("shapes", "expected the metric mine/max of shape"),
    ),
    "advantages of masked tokens": (
        "    shapes_advantages: ClassVar[bool] = True\n"
        + SHAPE
        + "        return Shaped(shaped.advantages + 1, shaped.base)",
        *("shapes", "expected advantages of exactly 0 outside batch.mask"),
    ),
}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loss(text: str) -> str:
    Path("wrong.py").write_text(HEAD + text + "\n")
    return "wrong.py:Mine"


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_loss_is_found_with_its_remedy(what):
    text, check, sentence = WRONG[what]
    config = parse_loss_fn({"variant": loss(text)})
    for quick in (True, False):
        found = dict(check_variant(config, quick=quick))
        assert check in found, found
        assert re.search(sentence, found[check]), found[check]
    with pytest.raises(UserError, match=r"`nemo-grpo variants check wrong\.py:Mine`"):
        try_out(config, "loss_fn.variant")


STOPPED = {
    "detach": "self.ratio(batch).detach()",
    "data": "self.ratio(batch).data",
    "no_grad": "self.held(batch)",
}


@pytest.mark.parametrize("how", STOPPED)
def test_a_declared_stop_gradient_is_held_however_it_is_written(how):
    head = (
        "    stops_gradient: ClassVar[bool] = True\n"
        "    def held(self, batch):\n"
        "        with torch.no_grad():\n"
        "            return self.ratio(batch)\n"
    )
    term = f"        return TokenTerms({STOPPED[how]} * a * batch.next_token_logprobs)"
    assert check_variant(parse_loss_fn({"variant": loss(head + TERMS + term)})) == []
    doubled = "x = batch.next_token_logprobs; x.register_hook(lambda g: 2 * g) if x.requires_grad else None"
    wrong = loss(f"{head}{TERMS}        {doubled}\n{term}")
    assert [found.check for found in check_variant(parse_loss_fn({"variant": wrong}))] == ["differences"]


def test_a_misspelt_declaration_without_annotation_is_named_in_one_line():
    with pytest.raises(UserError) as error:
        parse_loss_fn({"variant": loss("    need_prev_logprobs = False")})
    assert str(error.value) == (
        "loss_fn.variant=wrong.py:Mine: need_prev_logprobs is nothing that a variant has; did you mean "
        "'needs_prev_logprobs'?; a parameter is `need_prev_logprobs: type = value` (wrong.py:7)"
    )


def test_a_right_loss_passes_and_the_quick_part_is_quick():
    config = parse_loss_fn({"variant": loss("    pass")})
    assert check_variant(config) == []
    start = time.process_time()
    try_out(config, "loss_fn.variant")
    assert time.process_time() - start < 1  # CPU time; about 0.05


def test_the_command_lists_every_check_and_fails_with_1():
    run = lambda *line: CliRunner().invoke(app, ["variants", "check", *line])  # noqa: E731
    right = run("tr_grpo", "weighting=reverse")
    assert (right.exit_code, right.output.count("ok ")) == (0, 19), right.output
    assert run("dr_grpo").exit_code == 0
    wrong = run(loss(WRONG["a mean over rows"][0]))
    assert wrong.exit_code == 1
    assert "failed  microbatches: expected the same in one piece and as 5 microbatches" in wrong.output
    assert "ok      order" in wrong.output
    assert "did you mean" in str(run("tr_grpo", "alfa=1").exception)


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


@pytest.mark.parametrize(
    ("number", "told"), [(1, "a: 1"), (2, "a: 1; b: 2"), (3, "a: 1; b: 2 (3 checks fail)")]
)
def test_a_run_is_refused_with_two_failures_and_their_number(monkeypatch, number, told):
    failures = [("a", "1"), ("b", "2"), ("c", "3")][:number]
    monkeypatch.setattr(runner, "check_variant", lambda _config, quick: failures)
    with pytest.raises(UserError) as refused:
        try_out(parse_loss_fn({"variant": "gpg"}), "loss_fn.variant")
    assert str(refused.value) == f"loss_fn.variant=gpg: {told}; try `nemo-grpo variants check gpg`"
