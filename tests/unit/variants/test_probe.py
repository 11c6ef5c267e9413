"""Properties that the probe finds, of the package's variants and of a user's own losses."""

from dataclasses import replace

import pytest
import torch

from nemo_grpo.core.objective import Shaped, TokenTerms
from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.base import RatioConfig

READS, SHAPES, SPANS, FOLDS = "reads_scores", "shapes_advantages", "spans_groups", "folds"
BONUS = "learns_without_advantages"
WINDOW = {"variant": "clip_cov", "covariance_min": 50.0, "covariance_max": 60.0}
SECTIONS = [
    ({"variant": "grpo", "use_leave_one_out_baseline": True}, {FOLDS}),
    ({"variant": "gspo"}, {FOLDS}),
    ({"variant": "clip_cov"}, {READS, SHAPES, SPANS, FOLDS}),
    (WINDOW, {READS, SHAPES, SPANS, FOLDS}),
    ({"variant": "cw_grpo"}, {READS, SHAPES, FOLDS}),
    ({"variant": "cw_grpo", "scope": "batch"}, {READS, SHAPES, SPANS, FOLDS}),
    ({"variant": "cw_grpo", "author_compat": True}, {FOLDS}),
    ({"variant": "erpo"}, {READS, SHAPES, SPANS, FOLDS}),
    ({"variant": "gpg"}, {SHAPES, SPANS, FOLDS}),
    ({"variant": "gpg", "use_alpha": False}, {FOLDS}),
    ({"variant": "gpg", "use_alpha": False, "reward_normalization": "batch"}, {SPANS, FOLDS}),
    ({"variant": "maxrl"}, {FOLDS}),
    ({"variant": "dppo"}, {FOLDS}),
    ({"variant": "sapo"}, {FOLDS}),
    ({"variant": "tr_grpo", "weighting": "random"}, set()),
    ({"variant": "tr_grpo", "weighting": "random", "kl_weighting": "none"}, {FOLDS}),
]


def found(config) -> set[str]:
    return {name for name in (READS, SHAPES, SPANS, BONUS, FOLDS) if getattr(config.found, name)}


@pytest.mark.parametrize(("section", "expected"), SECTIONS)
def test_properties_of_a_variant_are_those_of_its_equations(section, expected):
    assert found(parse_loss_fn(section)) == expected


class Scores(RatioConfig):
    def shape(self, batch, seed):
        shaped = super().shape(batch, seed)
        return Shaped(shaped.advantages * batch.prev_logprobs.exp(), shaped.base)


class FewScores(RatioConfig):
    """Reads logprobs that change nothing on an ordinary step."""

    def shape(self, batch, seed):
        shaped = super().shape(batch, seed)
        return Shaped(torch.where(batch.prev_logprobs < -1e6, 0.0, shaped.advantages), shaped.base)


class StepMean(RatioConfig):
    def shape(self, batch, seed):
        shaped = super().shape(batch, seed)
        return Shaped(shaped.advantages * (1 + batch.rewards.mean()), shaped.base)


class Entropic(RatioConfig):
    def terms(self, prepared):
        terms = super().terms(prepared)
        return replace(terms, policy=terms.policy - 0.1 * prepared.batch.next_token_logprobs)


class Squared(RatioConfig):
    """Not proportional to the advantages, so factors of them are not factors of the term."""

    aggregation: str = "group_token_mean"

    def terms(self, prepared):
        a = prepared.advantages
        return TokenTerms(self.ratio(prepared.batch) * a * a.abs())


class Broken(RatioConfig):
    def shape(self, batch, seed):
        raise RuntimeError("not today")


OWN = {
    Scores: {READS, SHAPES, FOLDS},
    FewScores: {READS, FOLDS},
    StepMean: {SHAPES, SPANS, FOLDS},
    Entropic: {BONUS, FOLDS},
    Squared: set(),
    Broken: {READS, SHAPES, SPANS, BONUS},
}


@pytest.mark.parametrize("own", OWN, ids=lambda own: own.__name__)
def test_properties_of_an_own_loss_are_found_and_of_a_broken_one_assumed(own):
    config = own(variant="own")
    assert found(config) == OWN[own]
    built = config.build()
    assert (built.needs_scores, built.learns_without_advantages) == (READS in OWN[own], BONUS in OWN[own])
