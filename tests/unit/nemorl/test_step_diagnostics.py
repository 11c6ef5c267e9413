"""Token diagnostics of a cluster run: those of the same step on the embedded engine."""

import json

import torch

from nemo_grpo.core.batch import TokenBatch
from nemo_grpo.nemorl.advantage import StepDiagnostics, VariantEstimator, predicted_tokens
from nemo_grpo.report.tokens import token_diagnostics
from nemo_grpo.variants import parse_loss_fn

ROWS = [[1, 2, 5, 6], [1, 2, 7], [3, 4, 5, 8], [3, 4, 9, 5]]
LOGS = [
    [{"role": "user", "token_ids": row[:2]}, {"role": "assistant", "token_ids": torch.tensor(row[2:])}]
    for row in ROWS
]
MASK = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).float()
REWARDS = torch.tensor([1.0, 0.0, 1.0, 0.0])
LOGPROBS = -torch.rand(4, 4, generator=torch.Generator().manual_seed(0))


def test_predicted_tokens_are_those_behind_each_column():
    assert predicted_tokens(LOGS, 3).tolist() == [[2, 5, 6], [2, 7, 0], [4, 5, 8], [4, 9, 5]]


def test_estimator_measures_the_step_as_the_embedded_engine_does(tmp_path):
    config = parse_loss_fn({"variant": "grpo"})
    made = VariantEstimator(config, num_generations=2, diagnostics=StepDiagnostics(tmp_path, 2, str))
    logged = []
    for _ in range(4):
        prompts = torch.tensor([row[:2] for row in ROWS])
        made.compute_advantage(prompts, REWARDS, MASK, {"message_log": LOGS}, logprobs_policy=LOGPROBS)
        logged.append("tokens/gradient_cv" in made.last_metrics)
    rows = [json.loads(line) for line in (tmp_path / "diagnostics.jsonl").read_text("utf-8").splitlines()]
    assert [row.pop("step") for row in rows] == [1, 2, 4]
    assert logged == [True, True, False, True]
    batch = TokenBatch(
        prev_logprobs=LOGPROBS[:, 1:],
        token_mask=MASK[:, 1:],
        sample_mask=torch.ones(4, dtype=torch.bool),
        rewards=REWARDS,
        group_ids=torch.tensor([0, 0, 1, 1]),
    )
    objective = config.build()
    ids = torch.tensor([[2, 5, 6], [2, 7, 0], [4, 5, 8], [4, 9, 5]])
    numbers, details = token_diagnostics(objective, objective.prepare(batch), ids, str)
    assert rows[0] == json.loads(json.dumps(details))
    assert {name: made.last_metrics[name] for name in numbers} == numbers


def test_no_period_writes_nothing(tmp_path):
    prepared = parse_loss_fn({"variant": "grpo"}).build()
    assert StepDiagnostics(tmp_path, 0, str).measure(prepared, None, LOGS, 1) == {}
    assert not list(tmp_path.iterdir())
