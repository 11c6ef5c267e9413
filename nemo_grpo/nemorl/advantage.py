"""NeMo-RL's advantage estimator for any variant: advantages, token weights and metrics of a step.

It runs on the driver, the only place that sees whole groups: workers get rows in any order, and split.
NeMo-RL's single controller calls it once per chunk of a step's groups, see `single_controller`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from nemo_grpo.core.advantages import implausible_advantage
from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.objective import as_kept
from nemo_grpo.core.random import response_ids, step_seed
from nemo_grpo.nemorl.step_context import StepContext
from nemo_grpo.recipe import Recipe
from nemo_grpo.run.diagnostics import StepDiagnostics
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants.base import VariantConfig

log = logging.getLogger(__name__)

NEEDS_SCORES = ("mismatch/", "covariance/")
"""Prefixes of metrics that need prev_logprobs, which are zeros under force_on_policy_ratio."""


def group_ids(prompt_ids: Tensor, num_generations: int) -> Tensor:
    """Number the groups of a step, whose rows are adjacent.

    NeMo-RL identifies a group by its prompt, which would merge a prompt drawn twice in a step, or two images
    with the same question. Here each run of rows with equal prompts is cut into groups of
    ``num_generations``.

    Args:
        prompt_ids: [B, P], padded.
        num_generations: G.

    Returns:
        [B] int64.
    """
    changes = torch.ones(len(prompt_ids), dtype=torch.bool)
    changes[1:] = (prompt_ids[1:] != prompt_ids[:-1]).any(1).cpu()
    row = torch.arange(len(prompt_ids))
    start_of_run = torch.where(changes, row, 0).cummax(0).values
    starts_group = (row - start_of_run) % num_generations == 0
    return starts_group.cumsum(0) - 1


def predicted_tokens(logs: Sequence[Sequence[Mapping[str, Any]]], width: int) -> Tensor:
    """Return [B, width], the token predicted in each column of a step's tensors; 0 after the last one."""
    tokens = torch.zeros(len(logs), width, dtype=torch.long)
    for row, messages in zip(tokens, logs, strict=True):
        whole = torch.cat([torch.as_tensor(message["token_ids"]).flatten() for message in messages])
        row[: len(whole) - 1] = whole[1 : width + 1]
    return tokens


@dataclass(kw_only=True)
class VariantEstimator:
    """NeMo-RL's advantage estimator for any variant.

    Attributes:
        step: finished steps, those before a resume included, so that random draws continue.
        folds: the advantages carry token weights and row factors (`PreparedBatch.folded`).
        drops_groups: the step is what dynamic sampling keeps of its draws; see `as_kept`.
        is_scored: NeMo-RL computes the policy's logprobs (`Recipe.policy_is_scored`); else they are zeros.
        has_warned: groups that are split were warned of.
        last_metrics: metrics of the newest step; NeMo-RL logs them in asynchronous training, and through
            `StepContext.metrics` in synchronous training.
        carried: statistics that the variant carries from step to step.
    """

    config: VariantConfig = field(kw_only=False)
    num_generations: int
    seed: int = 0
    step: int = 0
    context: StepContext = field(default_factory=StepContext)
    diagnostics: StepDiagnostics | None = None
    folds: bool = False
    drops_groups: bool = False
    is_scored: bool = True
    has_warned: bool = False
    last_metrics: dict[str, float] = field(default_factory=dict)
    carried: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.objective = self.config.build()

    @classmethod
    def of(cls, recipe: Recipe, context: StepContext, **further: Any) -> Self:
        """Make the estimator of a recipe.

        Args:
            recipe: gives the variant, the group size and the seed.
            context: connects the estimator with sampling and policy.
            further: values of other fields.
        """
        return cls(
            recipe.loss_fn,
            num_generations=recipe.grpo.num_generations_per_prompt,
            seed=recipe.grpo.seed,
            context=context,
            # The single controller does not read the setting.
            drops_groups=recipe.grpo.use_dynamic_sampling and not recipe.has_single_controller,
            is_scored=recipe.policy_is_scored,
            **further,
        )

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        repeated_batch: Mapping[str, Any] | None = None,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
        **further: Any,
    ) -> Tensor:
        """Compute the advantages of the step's tokens.

        Args:
            prompt_ids: [B, P].
            rewards: [B]; NaN leaves a response out of group and loss.
            mask: [B, S], token_mask x sample_mask.
            repeated_batch: its conversations identify responses for random draws.
            logprobs_policy: [B, S], nats; index t belongs to token t.
            logprobs_reference: [B, S], like the policy's.
            further: extra arguments of asynchronous training; ``generation_logprobs`` is used.

        Returns:
            [B, S] float32 on the CPU; exactly 0 where the mask is 0.
        """
        batch = self._batch(prompt_ids, rewards, mask, logprobs_policy, logprobs_reference, further)
        self._warn_of_split_groups(batch.group_ids)
        logs = None if repeated_batch is None else repeated_batch.get("message_log")
        ids = None if logs is None else response_ids(map(_tokens, logs))
        batch = replace(batch, response_ids=ids, carried=self.carried)
        prepared = self.objective.prepare(batch, seed=step_seed(self.seed, self.step))
        self.carried = prepared.carried
        self.step += 1
        warning = implausible_advantage(prepared)
        if warning:
            log.warning("step %d: %s", self.step, warning)

        prepared = self._hand_to_policy(batch, prepared)
        metrics = self._meaningful_metrics(prepared.metrics, further)
        # One copy from the device for all of them.
        values = torch.stack([metric.double() for metric in metrics.values()]).tolist()
        self.last_metrics = dict(zip(metrics, values, strict=True))
        if self.diagnostics is not None and logs is not None and self.diagnostics.is_due(self.step):
            tokens = predicted_tokens(logs, prepared.batch.mask.shape[1])
            self.last_metrics |= self.diagnostics.measure(self.objective, prepared, tokens, self.step)
        self.context.metrics.update({name: [number] for name, number in self.last_metrics.items()})
        return _unaligned(prepared.advantages)

    def _hand_to_policy(self, batch: TokenBatch, prepared: PreparedBatch) -> PreparedBatch:
        """Put the tensors that the loss needs in addition to the advantages into the context.

        Returns:
            The prepared step; if the estimator folds, its advantages contain token weights and row factors.
        """
        has_abstaining_reward = not batch.in_groups.all()
        if has_abstaining_reward:
            self.context.train_tensors["sample_mask"] = prepared.batch.sample_mask.float()
        if prepared.row_factors is not None:
            # Count before folding: afterwards nothing shows that the step had row factors.
            self.context.num_sequences = int(prepared.batch.sample_mask.sum())
        if self.folds:
            prepared = self._folded(prepared)
        if prepared.token_weights is not None:
            self.context.train_tensors["token_weights"] = _unaligned(prepared.token_weights)
        if prepared.row_factors is not None:
            self.context.train_tensors["row_factors"] = prepared.row_factors.float()
        return prepared

    def _meaningful_metrics(
        self, metrics: Mapping[str, Tensor], further: Mapping[str, Any]
    ) -> Mapping[str, Tensor]:
        """Leave out metrics of logprobs that NeMo-RL did not compute or did not pass."""
        omitted_prefixes: tuple[str, ...] = ()
        # NeMo-RL's synchronous trainer does not pass the rollouts' logprobs.
        if further.get("generation_logprobs") is None:
            omitted_prefixes += ("mismatch/",)
        if not self.is_scored:
            omitted_prefixes += NEEDS_SCORES
        metrics = {name: value for name, value in metrics.items() if not name.startswith(omitted_prefixes)}
        return as_kept(metrics) if self.drops_groups else metrics

    def _warn_of_split_groups(self, ids: Tensor) -> None:
        """Warn once if the prompts of one problem differ, so that its responses form separate groups.

        An environment causes this if it writes something into each prompt, such as a time.
        """
        sizes = ids.bincount()
        is_split = sizes != self.num_generations
        if not self.has_warned and bool(is_split.any()):
            self.has_warned = True
            log.warning(
                "step %d: %d of %d groups have other than the %d responses of "
                "grpo.num_generations_per_prompt: the prompts of one problem differ in their tokens, so "
                "that its responses are not compared with each other",
                self.step + 1, int(is_split.sum()), len(sizes), self.num_generations,
            )  # fmt: skip

    def _folded(self, prepared: PreparedBatch) -> PreparedBatch:
        """Multiply token weights and row factors into the advantages, if the variant allows it."""
        if prepared.token_weights is not None and not self.config.folds:
            raise UserError(
                f"data_plane.enabled=true: {self.objective.name} returns token_weights from shape(), and "
                "NeMo-RL brings the loss advantages alone; set data_plane.enabled=false, or let terms() "
                "multiply its policy term by them"
            )
        return prepared.folded()

    def _batch(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        policy_logprobs: Tensor | None,
        reference_logprobs: Tensor | None,
        further: Mapping[str, Any],
    ) -> TokenBatch:
        """Align NeMo-RL's tensors for the objective, and raise UserError if it needs one that is absent."""
        name = self.objective.name
        if policy_logprobs is None:
            raise UserError(
                f"{name}: NeMo-RL gave no logprobs of the policy, as its trainers do; use a tested version"
            )
        if self.objective.needs_reference and reference_logprobs is None:
            raise UserError(
                f"{name}: NeMo-RL gave no logprobs of the reference; set loss_fn.reference_policy_kl_penalty "
                "above 0"
            )
        entropies = self.context.take_entropies()
        if self.objective.needs_entropy and entropies is None:
            raise UserError(
                f"{name} needs the policy's entropies, and the policy gave none; train with "
                "nemo_grpo.nemorl.run_grpo, whose Megatron worker computes them"
            )
        rewards = rewards.detach().float().cpu()
        # A reward function that abstains returns NaN.
        is_rewarded = rewards.isfinite()
        return TokenBatch(
            prev_logprobs=_aligned(policy_logprobs),
            generation_logprobs=_aligned(further.get("generation_logprobs")),
            reference_policy_logprobs=_aligned(reference_logprobs)
            if self.objective.needs_reference
            else None,
            entropies=_aligned(entropies) if self.objective.needs_entropy else None,
            token_mask=_aligned(mask),
            sample_mask=mask.bool().any(1).cpu() & is_rewarded,
            rewarded=is_rewarded,
            rewards=rewards,
            group_ids=group_ids(prompt_ids, self.num_generations),
        )


def _tokens(messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[int]]:
    """Return a conversation's prompt tokens (all before the first answer) and its answers' tokens."""
    prompt: list[int] = []
    answers: list[int] = []
    has_answered = False
    for message in messages:
        tokens = torch.as_tensor(message["token_ids"]).tolist()
        if message["role"] == "assistant":
            has_answered = True
            answers += tokens
        elif not has_answered:
            prompt += tokens
    return prompt, answers


def _aligned(tokens: Tensor | None) -> Any:
    """Cut NeMo-RL's [B, S] to [B, S - 1] on the CPU; column t belongs to the token predicted there."""
    return None if tokens is None else tokens[:, 1:].detach().float().cpu()


def _unaligned(tokens: Tensor) -> Tensor:
    """Pad [B, S - 1] to [B, S] float32; nothing predicts the first token."""
    return torch.nn.functional.pad(tokens.float(), (1, 0))
