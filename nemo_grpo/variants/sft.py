"""SFT: supervised fine-tuning on demonstrations, the baseline of ERPO (Tables 1, 2) and GPG (Tables 6-8).

    loss = - token_mean(logp)        over the tokens of the demonstrated responses; prompts carry no loss

This is the objective of a rollout whose tokens all have advantage 1, so SFT trains through the same update:
the sum is divided by the step's tokens, however they are split over microbatches and ranks.

Deviation: none; the papers state no loss.
"""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from nemo_grpo.core.advantages import group_advantages
from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.objective import Shaped, TokenTerms
from nemo_grpo.core.surrogates import reinforce
from nemo_grpo.variants.base import VariantConfig

FROM_THE_RECIPE = ("variant", "max_response_length")
"""Keys that every recipe sets, or that follow from others."""


class SFT(VariantConfig):
    """Supervised fine-tuning."""

    title: ClassVar[str] = "SFT"
    paper: ClassVar[str] = "baseline of ERPO and GPG"
    learns_from_demonstrations: ClassVar[bool] = True
    reads_scores: ClassVar[bool] = False
    shapes_advantages: ClassVar[bool] = True
    spans_groups: ClassVar[bool] = False
    learns_without_advantages: ClassVar[bool] = False
    folds: ClassVar[bool] = True

    variant: Literal["sft"] = "sft"

    @model_validator(mode="after")
    def _has_no_parameters(self) -> Self:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in FROM_THE_RECIPE and value != field.default:
                raise ValueError(f"{name}={value}: sft has no parameters; leave it out")
        return self

    def shape(self, batch: TokenBatch, seed: int) -> Shaped:
        """Give every token of a response advantage 1."""
        # The group advantages are for the step's metrics alone.
        return Shaped(batch.counts, group_advantages(batch, normalization="none"))

    def terms(self, prepared: PreparedBatch) -> TokenTerms:
        """Return logp."""
        return TokenTerms(reinforce(prepared.batch.next_token_logprobs, prepared.advantages))
