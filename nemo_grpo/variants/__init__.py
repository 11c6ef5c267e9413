"""The algorithms, one file each; turns a ``loss_fn`` section into an `Objective`."""

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from nemo_grpo.core.objective import Objective
from nemo_grpo.support.aliases import advice_on
from nemo_grpo.support.errors import UserError, as_yaml, did_you_mean
from nemo_grpo.support.extensions import is_reference, load_class
from nemo_grpo.variants.base import VariantConfig
from nemo_grpo.variants.cispo import CISPO
from nemo_grpo.variants.clip_cov import ClipCov
from nemo_grpo.variants.cw_grpo import CWGRPO
from nemo_grpo.variants.dapo import DAPO
from nemo_grpo.variants.dppo import DPPO
from nemo_grpo.variants.dr_grpo import DrGRPO
from nemo_grpo.variants.erpo import ERPO
from nemo_grpo.variants.gpg import GPG
from nemo_grpo.variants.grpo import GRPO
from nemo_grpo.variants.gspo import GSPO
from nemo_grpo.variants.maxrl import MaxRL
from nemo_grpo.variants.nemo_rl_loss import NeMoRLLoss
from nemo_grpo.variants.sapo import SAPO
from nemo_grpo.variants.sft import SFT
from nemo_grpo.variants.tr_grpo import TRGRPO

_CLASSES = (GRPO, DrGRPO, DAPO, GSPO, CISPO, ClipCov, CWGRPO, TRGRPO, ERPO, GPG, MaxRL, DPPO, SAPO)
VARIANTS: dict[str, type[VariantConfig]] = {
    config.model_fields["variant"].default: config for config in _CLASSES
}
"""Variant name -> configuration class. To add a variant: its file, its class above, a recipe, a test."""

OBJECTIVES: dict[str, type[VariantConfig]] = {**VARIANTS, "sft": SFT}
"""Values of ``loss_fn.variant``: the variants, which learn from rollouts, and the supervised baseline."""

_VARIANTS_WITHOUT_RATIO = [
    name for name, config in VARIANTS.items() if "ratio_clip_min" not in config.model_fields
]

REFUSED_STOCK_KEYS = {
    "token_level_loss": "use loss_fn.aggregation=token_mean or sequence_mean",
    "disable_ppo_ratio": "for plain policy gradient use loss_fn.variant="
    + " or ".join(_VARIANTS_WITHOUT_RATIO),
    "use_kl_in_reward": "the KL penalty is a term of the loss in every variant; leave this key out",
    "use_cispo": "use loss_fn.variant=cispo, or leave it out",
    "positive_example_nll_weight": "no variant has this term; leave it out",
}
"""Keys of NeMo-RL's own loss that would change a variant's objective -> the remedy."""


def parse_loss_fn(loss_fn: Mapping[str, Any]) -> VariantConfig:
    """Validate a recipe's ``loss_fn`` section.

    Args:    loss_fn: ``variant`` and that variant's parameters; ``variant: null`` is NeMo-RL's own loss.
    Returns: the variant's configuration; ``.build()`` makes the objective.
    Raises:  UserError: the variant or one of its parameters does not exist, or has a value that is refused.
    """
    if "variant" not in loss_fn:
        raise UserError(f"loss_fn.variant is missing; add one of {', '.join(OBJECTIVES)}")
    name = loss_fn["variant"]
    config = NeMoRLLoss if name is None else variant_class(str(name), "loss_fn.variant")
    # Before pydantic's own checks, which would call these keys misspelt.
    for key, remedy in REFUSED_STOCK_KEYS.items():
        if key in loss_fn and not config.is_stock:
            raise UserError(f"loss_fn.{key}={as_yaml(loss_fn[key])} is not supported: {remedy}")
    try:
        return config.model_validate(dict(loss_fn))
    except ValidationError as error:
        messages = [_explain(str(name), config, details, loss_fn) for details in error.errors()]
        raise UserError("; ".join(messages)) from None


def variant_class(name: str, key: str) -> type[VariantConfig]:
    """Find a variant's configuration class: one of `OBJECTIVES`, or an own ``my_file.py:MyVariant``."""
    if is_reference(name):
        try:
            return load_class(name, VariantConfig, key)
        except UserError as error:
            message = str(error)
            if _NO_ANNOTATION in message:
                message = _explain_missing_annotation(message)
            raise UserError(message) from None
    if name.endswith(".py"):
        raise UserError(f"{key}={name} names a file and no class; write {name}:MyVariant")
    if name not in OBJECTIVES:
        raise UserError(f"{key}={name!r} is not a variant{did_you_mean(name, OBJECTIVES)}")
    return OBJECTIVES[name]


_NO_ANNOTATION = "PydanticUserError: A non-annotated attribute was detected: `"
"""Beginning of pydantic's error about ``name = value`` in a class's body, up to the attribute's name."""


def _explain_missing_annotation(message: str) -> str:
    """Reword pydantic's error about ``nmae = value`` as one line with the nearest name."""
    before, _, after = message.partition(_NO_ANNOTATION)
    name = after.partition(" ")[0]
    # `load_class` ends its message with the line of the user's file, in parentheses.
    line_of_file = after.rpartition("(")[2]
    attributes = [attribute for attribute in vars(VariantConfig) if not attribute.startswith("_")]
    hint = did_you_mean(name, attributes) if difflib.get_close_matches(name, attributes) else ""
    return (
        f"{before}{name} is nothing that a variant has{hint}; remove it, or write a parameter as "
        f"`{name}: type = value` ({line_of_file}"
    )


def _explain(name: str, config: type[VariantConfig], error: Any, section: Mapping[str, Any]) -> str:
    """Reword one of pydantic's errors: key, value, rule, remedy.

    Args:
        name: the variant's.
        config: its class.
        error: an element of ``ValidationError.errors()``.
        section: the recipe's ``loss_fn``.
    """
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        owners = [
            variant for variant, owner in VARIANTS.items() if key in owner.model_fields and variant != name
        ]
        hint = advice_on(key) or did_you_mean(key, config.model_fields)
        if owners:
            hint = (
                f" but of {', '.join(owners)}; ~loss_fn.{key} removes an inherited one, "
                "_override_: true all of them"
            )
        return f"loss_fn.{key} is not a parameter of {name}{hint}"
    if error["type"] == "missing":
        return f"loss_fn.{key} is missing; {name} has no default for it"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] in ("literal_error", "none_required"):  # a key that the variant fixes says why
        message += f" ({config.model_fields[key].description})"
    if not key:
        return f"loss_fn.{message}"
    origin = "" if error["loc"][0] in section else f" (the default of {name})"
    return f"loss_fn.{key}={error['input']!r}{origin}: {message}"


def build_objective(variant: str, **parameters: Any) -> Objective:
    """Build an algorithm by name.

    Args:    variant: a name of `OBJECTIVES`.  parameters: the recipe's ``loss_fn`` keys of that variant.
    Returns: `Objective` with ``prepare`` and ``loss``.

    Example:
        >>> objective = build_objective("grpo", ratio_clip_max=0.28)
        >>> objective.name, objective.needs_reference
        ('grpo', False)
    """
    return parse_loss_fn({"variant": variant, **parameters}).build()
