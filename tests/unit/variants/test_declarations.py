"""Declarations of the variants, against their behaviour, and those that a user's own loss could make."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from steps import ALL, IDS

from nemo_grpo.core.objective import Shaped, TokenTerms
from nemo_grpo.variants import parse_loss_fn
from nemo_grpo.variants.base import SAFE_DECLARATIONS, RatioConfig
from nemo_grpo.variants.checking import check_variant
from nemo_grpo.variants.checking.declarations import observed, undeclared
from nemo_grpo.variants.clip_cov import ClipCov
from nemo_grpo.variants.grpo import GRPO

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


def declared(config) -> dict[str, bool]:
    return {name: getattr(config, name) for name in SAFE_DECLARATIONS}


@pytest.mark.parametrize(("section", "expected"), SECTIONS)
def test_declarations_of_a_variant_are_those_of_its_equations(section, expected):
    config = parse_loss_fn(section)
    assert {name for name, value in declared(config).items() if value} == expected


BEHAVIOUR = [
    *({"variant": name, **parameters} for name, parameters in ALL),
    *(section for section, _ in SECTIONS),
    {
        "variant": "tr_grpo",
        "weighting": "random",
        "kl_weighting": "none",
        "weight_placement": "inside",
        "upper": 1.2,
    },
    {"variant": "grpo", "aggregation": "group_token_mean", "reference_policy_kl_penalty": 0.1},
    {"variant": "cw_grpo", "author_compat": True, "aggregation": "group_token_mean"},
]


@pytest.mark.parametrize("section", BEHAVIOUR, ids=[*IDS, *map(str, range(len(IDS), len(BEHAVIOUR)))])
def test_declarations_of_a_variant_are_its_behaviour(section):
    config = parse_loss_fn(section)
    assert declared(config) == observed(config)


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
def test_an_own_loss_is_safe_until_it_declares_what_was_observed(own):
    config = own(variant="own")
    assert declared(config) == SAFE_DECLARATIONS
    assert {name for name, value in observed(config).items() if value} == OWN[own]
    assert undeclared(config) == {
        name: not safe for name, safe in SAFE_DECLARATIONS.items() if (name in OWN[own]) != safe
    }
    built = config.build()
    assert (built.needs_scores, built.learns_without_advantages) == (True, True)


def test_an_inherited_declaration_holds_for_inherited_code_only():
    class OtherDefault(GRPO):
        ratio_clip_max: float | None = 0.3

    class Half:
        def policy_term(self, ratio, advantages):
            return 0.5 * ratio * advantages, {}

    class Mixed(Half, GRPO):
        folds: ClassVar[bool] = True

    class Child(Mixed):
        def shape(self, batch, seed):
            return super().shape(batch, seed)

    assert declared(OtherDefault()) == declared(GRPO())
    assert declared(Mixed()) == SAFE_DECLARATIONS | {"folds": True}
    assert declared(Child()) == SAFE_DECLARATIONS


def test_a_false_declaration_fails_the_check():
    class NoScores(ClipCov):
        reads_scores: ClassVar[bool] = False

    config = NoScores(covariance_min=-5.0, clip_fraction=0.5)
    failures = dict(check_variant(config, quick=True))
    assert "expected reads_scores = False, as the class declares; found True" in failures["declarations"]
