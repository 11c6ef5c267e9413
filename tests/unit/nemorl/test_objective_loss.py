"""The token loss as NeMo-RL calls it: on [B, S] data, whole, per row, and without NeMo-RL."""

import math
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from losses import build_loss

from nemo_grpo.nemorl.loss import EXTREMES, ObjectiveLoss
from nemo_grpo.variants import VARIANTS
from nemo_grpo.variants.base import RatioConfig

NUM_ROWS, LENGTH = 4, 7
CORRECTION = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.01}
SETTINGS = {name: {"variant": name} for name in VARIANTS} | {
    "dr_grpo": {"variant": "dr_grpo", "max_response_length": 9},
    "kl": {"variant": "grpo", "reference_policy_kl_penalty": 0.1, "kl_score_function_gradient": True},
    "group_token_mean": {"variant": "grpo", "aggregation": "group_token_mean"},
    "tis": {"variant": "grpo", **CORRECTION, "truncated_importance_sampling_type": "tis"},
    "random": {"variant": "tr_grpo", "weighting": "random"},
    "weighted kl": {
        **{"variant": "tr_grpo", "weighting": "random", "kl_weighting": "inside"},
        "reference_policy_kl_penalty": 0.1,
    },
}


def data():
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_ROWS, LENGTH)
    prev = -torch.rand(shape, generator=generator)
    lengths = torch.tensor([[7], [5], [3], [6]])
    positions = torch.arange(LENGTH)
    return {
        "token_mask": ((positions >= 2) & (positions < lengths)).float(),
        "sample_mask": torch.tensor([1.0, 1.0, 1.0, 0.0]),
        "prev_logprobs": prev,
        "generation_logprobs": prev + 0.05 * torch.randn(shape, generator=generator),
        "reference_policy_logprobs": prev + 0.2 * torch.randn(shape, generator=generator),
        "advantages": torch.randn(shape, generator=generator),
        "token_weights": 0.5 + torch.rand(shape, generator=generator),
        "row_factors": 0.5 + torch.rand(NUM_ROWS, generator=generator),
    }


def current():
    generator = torch.Generator().manual_seed(1)
    return data()["prev_logprobs"][:, 1:] + 0.3 * torch.randn(NUM_ROWS, LENGTH - 1, generator=generator)


def counts(rows):
    mask = rows["token_mask"][:, 1:] * rows["sample_mask"][:, None]
    return {"global_valid_seqs": rows["sample_mask"].sum(), "global_valid_toks": mask.sum()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_loss_per_row_adds_up_to_the_whole(setting):
    loss_fn, rows = build_loss(SETTINGS[setting]), data()
    whole = current().requires_grad_()
    loss, metrics = loss_fn(whole, rows, **counts(rows))
    loss.backward()
    parts = current().requires_grad_()
    total, summed = torch.zeros(()), dict.fromkeys(metrics, 0.0)
    for row in range(NUM_ROWS):
        length = int(rows["token_mask"][row].nonzero().max()) + 1  # cut off the padding, as when packed
        part = {k: v[row : row + 1, :length] if v.dim() > 1 else v[row : row + 1] for k, v in rows.items()}
        value, numbers = loss_fn(parts[row : row + 1, : length - 1], part, **counts(rows))
        total = total + value
        summed = {name: summed[name] + number for name, number in numbers.items()}
    total.backward()
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(parts.grad, whole.grad)
    assert whole.grad.abs().sum() > 0
    for name in set(metrics) - set(EXTREMES):
        assert summed[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("setting", ["kl", "weighted kl"])
def test_garbage_under_the_mask_reaches_nothing(setting):
    loss_fn, clean, dirty = build_loss(SETTINGS[setting]), data(), data()
    masked = ~(clean["token_mask"] * clean["sample_mask"][:, None]).bool()
    for name in set(dirty) - {"token_mask", "sample_mask", "row_factors"}:
        dirty[name][masked] = float("nan")
    a = loss_fn(current(), clean, **counts(clean))
    now = current()
    now[masked[:, 1:]] = float("inf")
    b = loss_fn(now, dirty, **counts(dirty))
    assert torch.equal(a[0], b[0])
    assert a[1] == b[1]


def test_metrics_by_hand():
    # one token: logp_gen = log 0.4, logp_prev = log 0.5, logp = log 0.7, logp_ref = log 0.5
    def row(p):
        return torch.tensor([[0.0, p]]).log().nan_to_num(neginf=0.0)

    rows = {
        "token_mask": torch.tensor([[0.0, 1.0]]),
        "sample_mask": torch.ones(1),
        "prev_logprobs": row(0.5),
        "generation_logprobs": row(0.4),
        "reference_policy_logprobs": row(0.5),
        "advantages": torch.tensor([[0.0, 2.0]]),
    }
    loss_fn = build_loss({"variant": "grpo", "reference_policy_kl_penalty": 0.1})
    _, metrics = loss_fn(row(0.7)[:, 1:], rows, **counts(rows))
    expected = {
        "probs_ratio": 1.4,
        "probs_ratio_clamped": 1.2,
        "probs_ratio_min": 1.4,
        "probs_ratio_clamped_max": 1.2,
        "token_mult_prob_error": 1.25,
        "sampling_importance_ratio": 1.25,
        "gen_kl_error": 1.25 - 0.22314 - 1,
        "policy_kl_error": 0.8 + 0.22314 - 1,
        "js_divergence_error": 0.5 * (0.5 / 0.45 - 1 - 0.10536) + 0.5 * (0.4 / 0.45 - 1 + 0.11778),
        "approx_entropy": -(0.7 / 0.4) * -0.35667,
        "kl_penalty": 0.5 / 0.7 + 0.33647 - 1,
        "loss": -(1.2 * 2 - 0.1 * (0.5 / 0.7 + 0.33647 - 1)),
        "ratio/clip_fraction": 1.0,
        "num_valid_samples": 1.0,
    }
    for name, number in expected.items():
        assert metrics[name] == pytest.approx(number, abs=2e-5), name


def test_extremes_are_those_of_the_counting_tokens():
    rows, now = data(), data()["prev_logprobs"][:, 1:] + 0.5
    mask = (rows["token_mask"] * rows["sample_mask"][:, None])[:, 1:].bool()
    now[0, 3] += 0.1
    _, metrics = build_loss({"variant": "grpo"})(now, rows, **counts(rows))
    ratio = torch.exp(now - rows["prev_logprobs"][:, 1:])[mask]
    assert metrics["probs_ratio_min"] == pytest.approx(float(ratio.min()))
    assert metrics["probs_ratio_max"] == pytest.approx(float(ratio.max()))
    assert metrics["probs_ratio_clamped_min"] == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("parameters", "clamped"),
    [
        ({"variant": "grpo"}, 1.2),
        ({"variant": "cispo", "ratio_clip_max": 0.3}, 1.3),
        ({"variant": "sapo"}, math.exp(0.5)),
    ],
)
def test_the_clamped_ratio_follows_the_variants_own_bounds(parameters, clamped):
    rows, now = data(), data()["prev_logprobs"][:, 1:] + 0.5
    _, metrics = build_loss(parameters)(now, rows, **counts(rows))
    assert metrics["probs_ratio_clamped_max"] == pytest.approx(clamped)


def test_kl_is_taken_of_the_unfiltered_logprobs():
    rows = data()
    loss_fn = build_loss({"variant": "grpo", "reference_policy_kl_penalty": 1.0})
    filtered, unfiltered = current() + 0.2, current()
    _, with_filter = loss_fn(filtered, rows | {"curr_logprobs_unfiltered": unfiltered}, **counts(rows))
    _, plain = loss_fn(unfiltered, rows, **counts(rows))
    assert with_filter["kl_penalty"] == plain["kl_penalty"]
    assert with_filter["probs_ratio"] != plain["probs_ratio"]


BY = {"TOKEN_LEVEL": "TOKENS", "SEQUENCE_LEVEL": "SEQUENCES"}
NAMES = SimpleNamespace(**{name: name for name in ("TOKENS", "SEQUENCES", "NONE", *BY, "LOGPROB")})
SEQ_MASK = {**CORRECTION, "truncated_importance_sampling_ratio": 1.02}
SEQ_MASK |= {"truncated_importance_sampling_ratio_min": 0.97}


@pytest.mark.parametrize("setting", ["grpo", "gspo", "dr_grpo", "group_token_mean", "tis", "seq-mask-tis"])
def test_nemo_rl_is_told_what_each_number_was_divided_by(monkeypatch, setting):
    """Twice as many sequences halve what is divided by them, and so do tokens."""
    monkeypatch.setattr("nemo_grpo.nemorl.compat.import_name", lambda _: NAMES)
    masked = {"variant": "grpo", "truncated_importance_sampling_type": "seq-mask-tis", **SEQ_MASK}
    loss_fn, rows = build_loss(SETTINGS.get(setting, masked)), data()
    sizes = counts(rows)
    _, once = loss_fn(current(), rows, **sizes)
    found = {}
    for kind, size in (("SEQUENCES", "global_valid_seqs"), ("TOKENS", "global_valid_toks")):
        _, twice = loss_fn(current(), rows, **sizes | {size: 2 * sizes[size]})
        found |= {name: kind for name in once if once[name] and twice[name] == pytest.approx(once[name] / 2)}
    told = loss_fn.metric_normalizations
    assert told.keys() == once.keys()
    assert ("is_oob_ratio" in told) == setting.endswith("tis")
    assert {name: told[name] for name in found} == found
    assert found["loss"] == BY[loss_fn.loss_type]
    assert {name for name in told if told[name] == "NONE"} == {"num_valid_samples", *EXTREMES}
    assert loss_fn.input_type == "LOGPROB"


class CountsResponses(RatioConfig):
    def terms(self, prepared):
        terms = super().terms(prepared)
        return replace(terms, metrics=terms.metrics | {"responses": torch.ones(len(prepared.advantages))})


def test_an_own_metric_of_a_response_is_divided_by_responses(monkeypatch):
    monkeypatch.setattr("nemo_grpo.nemorl.compat.import_name", lambda _: NAMES)
    loss_fn, rows = ObjectiveLoss(CountsResponses(variant="own")), data()
    told = loss_fn.metric_normalizations  # as NeMo-RL's worker takes it, before the first call
    loss_fn(current(), rows, **counts(rows))
    assert (told["responses"], told["probs_ratio"]) == ("SEQUENCES", "TOKENS")


def test_loss_travels_to_workers():
    loss_fn, rows = build_loss(SETTINGS["kl"]), data()
    copy = pickle.loads(pickle.dumps(loss_fn))
    assert torch.equal(copy(current(), rows, **counts(rows))[0], loss_fn(current(), rows, **counts(rows))[0])
