"""What a number of ``loss_fn`` may be: the last value that is taken, and one that is not."""

from typing import Any

import pytest
from pydantic import ValidationError

from nemo_grpo.variants import VARIANTS
from nemo_grpo.variants.nemo_rl_loss import NeMoRLLoss

Bounds = tuple[tuple[Any, Any], ...]
POSITIVE: Bounds = ((1e-9, 0.0),)
NOT_NEGATIVE: Bounds = ((0.0, -1e-9),)
COUNT: Bounds = ((1, 0),)
BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys(("max_response_length", "num_buckets"), COUNT),
    "max_resample_attempts": ((0, -1),),
    **dict.fromkeys(("advantage_eps", "reference_policy_kl_penalty", "eta", "gamma"), NOT_NEGATIVE),
    **dict.fromkeys(("ratio_clip_min", "ratio_clip_max"), NOT_NEGATIVE),
    "ratio_clip_c": ((1.001, 1.0),),
    "divergence_threshold": (*NOT_NEGATIVE, (1.0, 1.001)),
    "ratio_max": POSITIVE,
    "truncated_importance_sampling_ratio": POSITIVE,
    "truncated_importance_sampling_ratio_min": NOT_NEGATIVE,
    **dict.fromkeys(("tau", "tau_positive", "tau_negative", "lower", "upper"), POSITIVE),
    **dict.fromkeys(("sigma_target", "beta_progress", "delta"), POSITIVE),
    "clip_fraction": (*POSITIVE, (1.0, 1.001)),
    "valid_fraction_threshold": (*NOT_NEGATIVE, (1.0, 1.001)),
    "entropy_momentum": (*NOT_NEGATIVE, (0.999, 1.0)),
}
FREE = {"alpha", "mu", "covariance_min", "covariance_max", "positive_example_nll_weight"}
FREE |= {"kl_input_clamp_value", "kl_output_clamp_value"}
LOSSES = {**VARIANTS, "NeMo-RL's own": NeMoRLLoss}


def refuses(variant: str, name: str, value: float) -> bool:
    """Because of its own bounds: rules between two parameters have their own tests."""
    section = {name: value} if variant not in VARIANTS else {"variant": variant, name: value}
    try:
        LOSSES[variant].model_validate(section)
    except ValidationError as error:
        return any(detail["loc"] == (name,) for detail in error.errors())
    return False


@pytest.mark.parametrize("variant", LOSSES)
def test_numbers_have_bounds_of_their_meaning(variant):
    for name, field in LOSSES[variant].model_fields.items():
        if str(field.annotation).split(" | ")[0] in ("<class 'float'>", "<class 'int'>", "float", "int"):
            if name in FREE or field.exclude:
                continue
            for taken, refused in BOUNDS[name]:
                assert not refuses(variant, name, taken), f"{name}={taken}"
                assert refuses(variant, name, refused), f"{name}={refused}"


@pytest.mark.parametrize("value", ["0.2", True])
def test_a_number_is_not_read_from_a_text_or_a_switch(value):
    assert refuses("grpo", "ratio_clip_min", value)
