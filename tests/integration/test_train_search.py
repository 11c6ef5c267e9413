"""Search-QA on the real engine: what a tool says carries no loss; runs, resumes and ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import ROOT
from ranks import run_ranks
from small_runs import AT_THE_ENDS, DP2, arguments, assert_same_rows, begin, lines_of, rows, weights_after
from toy_policies import hf_model, policy_of

from nemo_grpo import UserError, build_objective
from nemo_grpo.engine import rollout
from nemo_grpo.evaluate.runner import _judge, _scores
from nemo_grpo.evaluate.sampling import Completion
from nemo_grpo.recipe.megatron_sections import MegatronOptimizer
from nemo_grpo.run.groups import Group, Scored, assemble
from nemo_grpo.sampling.episodes import Response
from nemo_grpo.sampling.requests import Request, SamplingParams
from nemo_grpo.support.distributed import from_first_rank
from nemo_grpo.tasks import Problem, Prompt
from nemo_grpo.tasks.jsonl import write_problems
from nemo_grpo.tasks.retriever import RetrieverError
from nemo_grpo.tasks.scoring import Scorer

PROMPT = [4, 9, 17]
TURNS = [  # (tokens, by the policy) of two responses to one prompt
    [([5, 6, 7], True), ([50, 51, 52, 53], False), ([8, 9], True)],
    [([5, 11], True), ([60, 61], False), ([12], True)],
]
NUM_POLICY_TOKENS = 5 + 3


def response(turns, reward):
    tokens = torch.tensor([token for part, _ in turns for token in part])
    mask = torch.tensor([by_policy for part, by_policy in turns for _ in part])
    return Scored(Response(tokens, torch.full(tokens.shape, -1.0), mask, False, ""), reward=reward)


def a_step():
    group = Group(Problem("x", "?", "A"), PROMPT, [response(TURNS[0], 1.0), response(TURNS[1], -1.0)])
    return assemble([group])


def test_loss_and_gradient_are_those_of_the_policys_tokens_by_hand():
    """Rewards 1 and -1: mean 0, std sqrt(2), advantages +-1/sqrt(2); the ratio is 1 before the update."""
    model = hf_model()
    policy = policy_of(model, MegatronOptimizer(lr=1e-2, weight_decay=0.0, clip_grad=1e9))
    objective, step = build_objective("grpo"), a_step()
    prev, _ = policy.score(step.sequences, micro_batch_size=2, temperature=1.0)
    prev[~step.token_mask] = torch.nan  # the tool's
    prepared = objective.prepare(step.token_batch(prev), seed=0)
    result = policy.update(objective, prepared, step.sequences, micro_batch_size=1, temperature=1.0)
    advantage = 1 / (2**0.5 + 1e-6)
    assert result.metrics["loss/total"] == pytest.approx(-(5 - 3) * advantage / NUM_POLICY_TOKENS, abs=1e-5)
    loss = torch.zeros(())
    for turns, sign in zip(TURNS, (1, -1), strict=True):
        ids, chosen = list(PROMPT), []
        for tokens, by_policy in turns:
            chosen += [len(ids) + i for i in range(len(tokens))] if by_policy else []
            ids += tokens
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        loss = loss - sign * advantage * sum(logprobs[at - 1, ids[at]] for at in chosen) / NUM_POLICY_TOKENS
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)


SEARCH_QA = ROOT / "recipes/quickstart_search_qa.yaml"
SMALL = [
    "policy.train_micro_batch_size=4",
    "policy.generation.max_new_tokens=64",
    "nemo_grpo.rewards={format: 1.0, answer: 1.0}",
    "nemo_grpo.task.hops=[1]",
]


def test_a_corpus_that_is_missing_ends_the_run_before_it_begins(recipe, tmp_path):
    questions = write_problems(tmp_path / "questions.jsonl", [Problem("1", "Who?", "Bob")])
    held_out = write_problems(tmp_path / "held-out.jsonl", [Problem("2", "Where?", "There")])
    files = f"nemo_grpo.task.train_files=[{questions}]", f"nemo_grpo.task.validation_files=[{held_out}]"
    corpus = f"nemo_grpo.task.corpus={tmp_path}/none.jsonl"
    made = recipe(*SMALL, *files, corpus, "grpo.max_val_samples=1", of=SEARCH_QA)
    with pytest.raises(UserError, match=r"none\.jsonl is missing"):
        begin(made)
    assert not made.run_dir.exists()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of a run of two steps, and the weights after it."""
    folder = tmp_path_factory.mktemp("search")
    line = arguments(folder, "alone", *SMALL, "grpo.max_num_steps=2")
    (weights,) = run_ranks(1, weights_after, line, recipe=SEARCH_QA)
    return folder / "alone", weights


def test_a_run_searches_and_learns(alone):
    run, _ = alone
    last = rows(run)[-1]
    assert last["episode/num_searches"] > 0.5
    assert last["episode/num_turns"] > 1
    assert last["length/mean"] < last["episode/num_turns"] * 20  # the tool's tokens are not counted
    assert 0 <= last["validation/accuracy"] <= 1
    samples = lines_of(run / "samples.jsonl")
    assert any("<information>[1] " in sample["response"] for sample in samples)


def test_two_ranks_hold_the_same_conversations_as_one(tmp_path, alone):
    line = arguments(tmp_path, "both", *SMALL, "grpo.max_num_steps=2", *AT_THE_ENDS, *DP2)
    for weights in run_ranks(2, weights_after, line, recipe=SEARCH_QA):
        torch.testing.assert_close(weights, alone[1], rtol=1e-4, atol=2e-4)
    keys = ("reward/mean", "length/mean", "episode/num_turns", "episode/num_searches", "loss/total")
    assert_same_rows(alone[0], tmp_path / "both", *keys)


class ByRank:
    """A task whose verdicts hang on who asks, as those at a grader's time limit may."""

    config = SimpleNamespace(name="by_rank")

    def score(self, problem, response):
        return {"accuracy": float(dist.get_rank() == 0), "format": 1.0}

    def extract(self, response):
        return f"{response} on {dist.get_rank()}"


def as_each_rank_sees():
    """A tool's failure, the rewards of a group, and an evaluation's scores and answers."""
    dist.init_process_group("gloo")

    def fail():
        raise RetrieverError(f"gone on {dist.get_rank()}")

    with pytest.raises(RetrieverError) as failure:
        from_first_rank(fail)
    one = Response(torch.tensor([1]), torch.zeros(1), torch.ones(1, dtype=torch.bool), False, "a")
    rollout.sample_responses = lambda *_: [one, one]
    problem = Problem("p", "q", "a")
    scorer, request = Scorer(ByRank(), {"accuracy": 1.0}, Prompt()), Request([[1]], 2, SamplingParams(1), 0)
    (group,) = rollout.sample_groups(None, None, scorer, [problem], request)
    responses = [Completion("a", 1, False)]
    (scores,) = _scores(None, ByRank(), [problem], [responses])
    judged = _judge(ByRank(), responses, scores)
    return str(failure.value), [one.reward for one in group.responses], judged.scores, judged.extracted


def test_all_ranks_hold_what_the_first_one_was_told():
    expected = ("gone on 0", [1.0, 1.0], [1.0], ["a on 0"])
    assert run_ranks(2, as_each_rank_sees) == [expected] * 2
