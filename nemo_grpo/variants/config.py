"""`VariantConfig`: one variant's recipe keys, its declarations, and its two functions `shape` and `terms`."""

from inspect import isfunction
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from nemo_grpo.core.batch import PreparedBatch, TokenBatch
from nemo_grpo.core.objective import Objective, Shaped, TokenTerms
from nemo_grpo.variants.keys import CorrectionKeys

SAFE_DECLARATIONS = {
    "reads_scores": True,
    "shapes_advantages": True,
    "spans_groups": True,
    "learns_without_advantages": True,
    "folds": False,
}
"""Declaration -> its safe value: correct for any loss, because the engines then skip no work."""
UNDECLARED_METHODS = ("resampling",)
"""Methods that may be overridden without making the declarations again, since none describes them."""


class VariantConfig(CorrectionKeys):
    """One variant's parameters: the keys of the recipe's ``loss_fn`` section. Unknown keys are errors."""

    title: ClassVar[str] = "own variant"
    paper: ClassVar[str] = "none"
    stock_switch: ClassVar[str | None] = None
    """NeMo-RL's boolean that asks its own loss for this objective."""
    is_stock: ClassVar[bool] = False
    """NeMo-RL's own loss, which NeMo-RL computes with its own advantages."""
    needs_entropy: ClassVar[bool] = False
    """`shape` reads the policy's entropies."""
    compares_with_reference: ClassVar[bool] = False
    """`shape` subtracts the reference policy's logprobs from the policy's, with or without a KL penalty."""
    reads_scores: ClassVar[bool] = True
    """`shape` reads the scored logprobs. False saves the scoring pass of a step with one update."""
    shapes_advantages: ClassVar[bool] = True
    """`shape` gives a token another advantage than its response's group advantage."""
    spans_groups: ClassVar[bool] = True
    """`shape` computes a response's advantages or weights from other groups than its own, too."""
    learns_without_advantages: ClassVar[bool] = True
    """`terms` has a gradient where the advantage is 0, the KL penalty's aside."""
    folds: ClassVar[bool] = False
    """Loss and gradient stay the same with all weights in the advantages; see `PreparedBatch.folded`."""
    learns_from_demonstrations: ClassVar[bool] = False
    """A step is the task's demonstrations, one per prompt; nothing is sampled."""
    whole_groups_key: ClassVar[str | None] = None
    """Boolean parameter under which every loss call needs exactly one whole group."""
    sampling_keys: ClassVar[tuple[str, ...]] = ()
    """Parameters that have an effect only with grpo.use_dynamic_sampling."""
    without_dynamic_sampling: ClassVar[str | None] = None
    """Difference from the paper without grpo.use_dynamic_sampling, for messages; None: no difference."""

    force_on_policy_ratio: bool = Field(
        False, description="take the ratio as 1 without a scoring pass; one update per step (NeMo-RL)"
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Replace inherited declarations by the safe value where the class overrides what they describe.

        A declaration (`SAFE_DECLARATIONS`) describes the methods of the class that makes it. A class that
        overrides one of these methods (`shape`, `terms`, `ratio`, `policy_term`, ...), itself or by a mixin,
        gets the safe value of every declaration that it does not make again.
        """
        super().__init_subclass__(**kwargs)
        for name, safe_value in SAFE_DECLARATIONS.items():
            # The classes of the method resolution order before the declaring one may override its methods.
            is_declared_by = [name in vars(parent) for parent in cls.__mro__]
            declaring_index = is_declared_by.index(True)
            overriding_parents = cls.__mro__[:declaring_index]
            # The declaration describes all methods of its class, inherited ones included.
            declared_methods = set[str]()
            for parent in cls.__mro__[declaring_index:]:
                declared_methods |= set(vars(parent))
            if any(_public_methods(parent) & declared_methods for parent in overriding_parents):
                setattr(cls, name, safe_value)

    @model_validator(mode="after")
    def _forced_ratio_needs_no_scored_logprobs(self) -> Self:
        if self.force_on_policy_ratio and not self.is_stock and self.needs_scores:
            raise ValueError(
                "force_on_policy_ratio=true: the advantages are shaped by the scored logprobs or entropies, "
                "which NeMo-RL then leaves out; set it to false (an own loss that reads neither declares "
                "reads_scores = False)"
            )
        return self

    @property
    def needs_scores(self) -> bool:
        """True if `shape` waits for the scoring pass, for its logprobs or its entropies."""
        return self.needs_entropy or self.reads_scores

    @property
    def needs_reference(self) -> bool:
        """True if the reference policy's logprobs are needed."""
        return self.compares_with_reference

    @property
    def needs_whole_groups(self) -> bool:
        """True if a loss call must see exactly one whole group."""
        return self.whole_groups_key is not None and bool(getattr(self, self.whole_groups_key))

    @property
    def carries_statistics(self) -> bool:
        """True if `shape` reads `TokenBatch.carried`, which a checkpoint must then keep."""
        return False

    def resampling(self, max_draws: int) -> tuple[float, int]:
        """Return (minimum share of groups with signal, maximum draws per step) of dynamic sampling."""
        return 1.0, max_draws

    def shape(self, batch: TokenBatch, seed: int) -> Shaped:
        """Compute the step-level part; see `Objective`."""
        raise AssertionError(f"{type(self).__name__} does not implement shape()")

    def terms(self, prepared: PreparedBatch) -> TokenTerms:
        """Compute the token-level part; see `Objective`."""
        raise AssertionError(f"{type(self).__name__} does not implement terms()")

    def build(self) -> Objective:
        """Compose the objective."""
        return Objective(
            name=self.variant,
            shape=self.shape,
            terms=self.terms,
            aggregation=self.aggregation,
            max_response_length=self.max_response_length,
            correction=self.importance_correction(),
            needs_entropy=self.needs_entropy,
            needs_reference=self.needs_reference,
            needs_scores=self.needs_scores,
            learns_without_advantages=self.learns_without_advantages,
            whole_groups_per_loss_call=self.needs_whole_groups,
        )


def _public_methods(owner: type) -> set[str]:
    """Name the public methods that a class itself defines, except `UNDECLARED_METHODS`."""
    # Private ones are pydantic's validators: they check keys, and change no advantage, term or gradient.
    return {
        name
        for name, value in vars(owner).items()
        if isfunction(value) and not name.startswith("_") and name not in UNDECLARED_METHODS
    }
