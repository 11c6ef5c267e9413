"""The warning of rollouts that do not come from the weights that are trained."""

from types import SimpleNamespace as Of

import pytest
from unit.nemorl.loggers import Logger

from nemo_grpo.nemorl.callbacks import BF16_BOUND, EXCEEDS, FP8_BOUND, bound, watch_rollouts


def recipe(num_updates=1, precision="bfloat16", fp8=False, ahead=0):
    policy = Of(
        megatron_cfg=Of(fp8_in_use=fp8), generation=Of(backend="vllm", vllm_cfg=Of(precision=precision))
    )
    return Of(policy=policy, rollouts_ahead=ahead, num_updates_per_step=num_updates)


def logged(recipe, error):
    """The training metrics that reach the logger for a step."""
    logger = Logger()
    with watch_rollouts(recipe, logger):
        logger.log_metrics({"gen_kl_error": error, "loss": 1.0}, 7, prefix="train", step_finished=True)
    [(metrics, *where)] = logger.calls
    assert where == [7, "train", {"step_finished": True}]
    assert metrics.pop("loss") == 1.0
    return metrics


# 0.0456: stale weights, measured with two data-parallel ranks; 1.9e-5: the same run with fresh ones
@pytest.mark.parametrize(
    ("settings", "error", "exceeds"),
    [
        ({}, 0.0456, 1.0),
        ({}, 1.9e-5, 0.0),
        ({}, 0.0101, 1.0),
        ({}, 0.0099, 0.0),
        ({}, float("nan"), 1.0),
        ({"num_updates": 4}, 0.0101, 1.0),  # NeMo-RL's workers divide by the number of updates
        ({"num_updates": 4}, 0.0099, 0.0),
        ({"precision": "fp8"}, 0.0456, 1.0),
        ({"precision": "fp8"}, 0.029, 0.0),
        ({"fp8": True}, 0.029, 0.0),
        ({"ahead": 1}, 0.0276, 0.0),  # 0.01 + 1.2 - 1 - ln(1.2) = 0.02768
        ({"ahead": 1}, 0.0278, 1.0),
        ({"ahead": 1, "fp8": True}, 0.0476, 0.0),
        ({"ahead": 1, "fp8": True}, 0.0478, 1.0),
        ({"ahead": 4}, 0.354, 0.0),  # 0.01 + 1.2^4 - 1 - 4 ln(1.2) = 0.35431
        ({"ahead": 4}, 0.355, 1.0),
        ({"ahead": 4}, float("nan"), 1.0),
    ],
)
def test_error_above_the_bound_is_warned_of_and_logged(settings, error, exceeds, caplog):
    metrics = logged(recipe(**settings), error)
    assert metrics[EXCEEDS] == exceeds
    assert (metrics["gen_kl_error"] == error) or error != error
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == exceeds
    assert all("step 7: gen_kl_error" in text and "overlap_param_gather" in text for text in messages)


def test_rollouts_are_older_by_no_more_than_the_steps_that_there_were():
    bounds = [bound(recipe(ahead=3), step) for step in (1, 2, 3, 4, 5)]
    assert bounds[0] == bound(recipe(), 1) == BF16_BOUND
    assert bounds[1:3] == [bound(recipe(ahead=ahead), 9) for ahead in (1, 2)]
    assert bounds[3] == bounds[4] == pytest.approx(0.01 + 1.728 - 1 - 3 * 0.1823216, abs=1e-6)


@pytest.mark.parametrize("ahead", [0, 1])
def test_step_whose_every_response_is_empty_is_warned_of(ahead, caplog):
    """NeMo-RL's asynchronous rollouts go on when vLLM refuses every request."""
    with watch_rollouts(recipe(ahead=ahead), logger := Logger()):
        for step, length in ((3, 0.5), (4, 0.0)):
            metrics = {"gen_kl_error": 0.0, "mean_gen_tokens_per_sample": length}
            logger.log_metrics(metrics, step, prefix="train")
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("step 4: no response has a token")
    assert "'Error generating response'" in message


def test_bounds_lie_below_what_stale_weights_gave():
    assert bound(recipe(), 9) == BF16_BOUND < bound(recipe(fp8=True), 9) == FP8_BOUND < 0.0456


def test_other_metrics_pass_as_they_are():
    logger = Logger()
    with watch_rollouts(recipe(), logger):
        logger.log_metrics({"total": 2.0}, 3, prefix="timing/train")
    logger.log_metrics({"gen_kl_error": 1.0}, 4, prefix="train")
    assert [metrics for metrics, *_ in logger.calls] == [{"total": 2.0}, {"gen_kl_error": 1.0}]
