"""Which variants decide advantages without the scoring policy's logprobs, and what the loss is on-policy."""

from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from steps import PARAMETERS

from nemo_grpo import TokenBatch, build_objective
from nemo_grpo.engine.learning import Learner
from nemo_grpo.variants.grpo import GRPO
from nemo_grpo.variants.small_steps import counts, random_step

FROM_REWARDS_ALONE = {"grpo", "dr_grpo", "dapo", "tr_grpo", "gpg", "gspo", "cispo"}


def step() -> TokenBatch:
    batch = random_step([4, 6, 5, 3], [1.0, 0.0, 0.3, 1.0], [0, 0, 1, 1])
    return replace(batch, response_ids=torch.tensor([5, 9, 2, 7]))


@pytest.mark.parametrize("name", sorted(FROM_REWARDS_ALONE))
def test_on_policy_loss_and_gradient_are_those_of_equal_prev_logprobs(name):
    built, batch = build_objective(name, **(PARAMETERS[name] if name != "tr_grpo" else {})), step()

    def loss(prev: torch.Tensor, on_policy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        current = batch.next_token_logprobs.detach().clone().requires_grad_()
        prepared = built.prepare(replace(batch, prev_logprobs=prev, next_token_logprobs=prev), seed=3)
        part = prepared.select(slice(None), next_token_logprobs=current)
        part = part.on_policy() if on_policy else part
        value, metrics = built.loss(part, **counts(batch))
        if on_policy:
            assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-12)
        return value, torch.autograd.grad(value, current)[0]

    scored = loss(batch.next_token_logprobs.detach(), on_policy=False)
    unscored = loss(batch.generation_logprobs, on_policy=True)
    assert torch.equal(scored[0], unscored[0])
    assert torch.equal(scored[1], unscored[1])
    assert scored[1].abs().max() > 0


class EntropyAlone(GRPO):
    """Reads entropies, and nothing else of the scoring pass."""

    needs_entropy: ClassVar[bool] = True


def test_entropies_wait_for_the_scoring_pass_as_logprobs_do(monkeypatch):
    """The engine scores before the update."""
    config = EntropyAlone()
    assert not config.found.reads_scores
    recipe = SimpleNamespace(loss_fn=config, num_updates_per_step=1)

    class Scored(Exception):
        pass

    def score(*_):
        raise Scored

    monkeypatch.setattr(Learner, "score", score)
    with pytest.raises(Scored):
        Learner(recipe, config.build(), None).learn(None, None)
