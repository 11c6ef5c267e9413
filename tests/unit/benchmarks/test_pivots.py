"""The perturbation study: which positions, which replacements, what is compared."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config
from typer.testing import CliRunner

from benchmarks.studies import pivots
from benchmarks.studies.perturbation import Experiment, choose_positions, response_entropies
from benchmarks.studies.pivot_results import PivotSettings, PivotStudy, Point, Solved, sign_flip_p
from nemo_grpo.sampling.generate_hf import HFGenerator
from nemo_grpo.sampling.requests import SamplingParams
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem, Prompt

STOP = 19


class Tokenizer:
    """Twenty tokens, each a letter; `t` ends a response."""

    all_special_ids = [STOP]  # noqa: RUF012
    chat_template = "x"

    def __len__(self):
        return 20

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(97 + i) for i in ids if not (skip_special_tokens and i == STOP))

    def batch_decode(self, rows, skip_special_tokens=False):
        return [self.decode(row, skip_special_tokens) for row in rows]

    def apply_chat_template(self, messages, **_):
        return messages[-1]["content"]

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) - 97 for letter in text]}


@pytest.fixture(scope="module")
def generator():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.6,
    )
    made = HFGenerator(config)
    made.update_weights((name, value.clone()) for name, value in made.model.state_dict().items())
    return made


class Task:
    """A response is right if it holds the problem's letter."""

    def score(self, problem, response):
        return {"accuracy": float(problem.answer in response), "format": 1.0}


def of_policy(generator, settings, task=None):
    sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(STOP,))
    return Experiment(generator, Tokenizer(), task, Prompt(), sampling, settings)


def item(entropies, response=None):
    response = response or list(range(len(entropies)))
    return Solved(Problem("p", "ab", "c"), [0, 1], response, torch.tensor(entropies))


def test_pivots_are_the_most_and_calm_ones_the_least_undecided():
    chosen = choose_positions(item([0.1, 0.9, 0.3, 0.0, 0.5, 7.0]), PivotSettings(share=0.4))
    assert chosen["pivot"] == [1, 4]  # two of five candidates; the last token, 7.0, has nothing after it
    assert set(chosen["calm"]) == {0, 3}
    assert len(set(chosen["random"])) == 2
    assert max(chosen["random"]) <= 4
    bounded = PivotSettings(share=0.05, max_positions=4)
    assert [bounded.num_positions(candidates) for candidates in (1, 10, 30, 1000)] == [1, 1, 2, 4]


def test_prefixes_differ_in_the_chosen_token_only(generator):
    solved = item([0.1, 0.9, 0.3, 0.2], [5, 6, 7, STOP])
    for setting in ({"replacement": "uniform"}, {"replacement": "policy"}, {"perturbation": "truncate"}):
        points = of_policy(generator, PivotSettings(**setting)).choose_points([solved])
        for _, _, position, kept, replaced in points:
            assert kept == [0, 1, *solved.response[: position + 1]]
            if "perturbation" in setting:
                assert replaced == kept[:-1]
                continue
            assert replaced[:-1] == kept[:-1]
            assert replaced[-1] != kept[-1]
            assert setting == {"replacement": "policy"} or replaced[-1] != STOP


def test_together_replaces_all_tokens_of_a_kind_and_goes_on_behind_the_last(generator):
    solved = item([0.1, 0.9, 0.3, 0.0, 0.5, 7.0], [5, 6, 7, 8, 9, STOP])
    settings = PivotSettings(share=0.4, max_positions=None, perturbation="together")
    one_by_one = PivotSettings(share=0.4, max_positions=None)
    chosen = {kind: sorted(at) for kind, at in choose_positions(solved, settings).items()}
    points = of_policy(generator, settings).choose_points([solved])
    assert [(kind, position) for _, kind, position, _, _ in points] == [
        (k, at[-1]) for k, at in chosen.items()
    ]
    alone = {at: row[-1] for _, _, at, _, row in of_policy(generator, one_by_one).choose_points([solved])}
    for _, kind, position, kept, replaced in points:
        assert kept == [0, 1, *solved.response[: position + 1]]
        changed = {i - 2: token for i, token in enumerate(replaced) if token != kept[i]}
        assert changed == {at: alone[at] for at in chosen[kind]}  # the same replacements as one by one


def test_entropies_are_those_of_the_distribution_a_token_came_from(generator):
    short, long = ([0, 1], [5, 6, 7]), ([2, 3, 4], [8, 9, 10, 11])
    for prompt, response in (short, long):
        (alone,) = response_entropies(generator, [(prompt, response)])
        for t in range(len(response)):
            logits = generator.model(input_ids=torch.tensor([prompt + response[:t]])).logits[0, -1]
            expected = torch.distributions.Categorical(logits=logits).entropy()
            torch.testing.assert_close(alone[t], expected, atol=1e-5, rtol=1e-4)
    together = response_entropies(generator, [short, long])
    torch.testing.assert_close(together[0], response_entropies(generator, [short])[0])


def point(problem, kind, kept, replaced, position=0):
    return Point(problem, kind, position, 0.5, "a", "b", kept, replaced)


def test_summary_averages_within_responses_first():
    points = [point("p", "pivot", 1.0, 0.0), point("p", "pivot", 1.0, 0.5, 1), point("q", "pivot", 0.5, 0.5)]
    points += [point(name, kind, 1.0, 1.0) for name in "pq" for kind in ("random", "calm")]
    study = PivotStudy(PivotSettings(), 5, [], points)
    row = study.summary()["pivot"]
    assert row["kept"] == 0.75  # p: 1, q: 0.5
    assert row["replaced"] == pytest.approx(0.375)  # p: 0.25, q: 0.5
    assert row["drop"] == pytest.approx(0.375)  # p: 0.75, q: 0
    contrast = study.contrasts()["pivot - random"]
    assert contrast["difference"] == pytest.approx(0.375)
    assert contrast["stderr"] == pytest.approx(0.375)  # deviation 0.75 / sqrt 2, over sqrt 2 responses


def test_permutation_test_counts_sign_patterns():
    # Four equal differences: |mean| is reached by all plus or all minus, 2 of 16 patterns.
    assert sign_flip_p([0.5] * 4, seed=0) == pytest.approx(2 / 16, abs=0.015)
    assert sign_flip_p([0.0, 0.0], seed=0) == 1.0
    assert sign_flip_p([1.0] * 30, seed=0) == pytest.approx(1 / 10_001)


def study(generator, task, **settings):
    problems = [Problem(str(i), text, "") for i, text in enumerate(("ab", "cd", "ef", "gh"))]
    chosen = PivotSettings(num_problems=3, num_continuations=2, **settings)
    return of_policy(generator, chosen, task).study(problems)


def test_study_is_deterministic_and_follows_its_seed(generator):
    first, again = study(generator, Task()), study(generator, Task())
    assert first.points == again.points
    assert first.points != study(generator, Task(), seed=1).points
    assert len(first.solved) == 3
    assert first.num_tried == 3
    assert len(first.points) == 3 * 3
    json.dumps(first.to_dict(str), allow_nan=False)


def test_a_model_that_solves_nothing_is_refused(generator):
    hopeless = SimpleNamespace(score=lambda problem, response: {"accuracy": 0.0})
    with pytest.raises(UserError, match="solves none of 4 problems"):
        study(generator, hopeless)
    with pytest.raises(UserError, match="give --run RUN, or --model FOLDER and --recipe FILE"):
        CliRunner().invoke(pivots.app, [], catch_exceptions=False)
