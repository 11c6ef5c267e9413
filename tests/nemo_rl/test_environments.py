"""A recipe's task on NeMo-RL: data for its own collate function, and its own rollout over our turns."""

import functools
import types
from pathlib import Path

import pytest
import torch
from toy_training import character_tokenizer, toy_run

from nemo_grpo.nemorl import environments, task_data, trainer
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Prompt, parse_task
from nemo_grpo.tasks.special_tokens import reserved_texts

ASYNC = [
    "grpo.async_grpo.enabled=true",
    "policy.generation.vllm_cfg.async_engine=true",
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1, num_nodes: 1}}",
]
INFO = {
    "problem": {"id": "1", "question": "1 + 1?", "answer": "2", "metadata": {}},
    "episode": {}, "rewarded": 0.0,
}  # fmt: skip
SEARCH = {"name": "search_qa", "max_turns": 3, "top_k": 1}


@pytest.fixture
def tokenizer():
    return character_tokenizer()


def environment(section, rewards, reserved=(), own_files=None, prompt=None):
    settings = {"task": section, "rewards": rewards, "reserved": reserved, "own_files": own_files or {}}
    settings |= {"max_failed_rewards": 0.1, "num_generations": 2, "prompt": prompt or {}}
    made = environments.TaskEnvironmentImpl(settings)
    step = types.SimpleNamespace(remote=lambda *arguments: functools.partial(made.step, *arguments))
    return types.SimpleNamespace(step=step, made=made)


def log_of(said, asked="?"):
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def observes(made, seen, *ends):
    """Turns are kept in ``seen``; whether one ends its response comes from ``ends``."""
    following = iter(ends)

    def observe(episodes, turns, reserved):
        seen.extend(turns)
        said = None if next(following) else "A"
        return [types.SimpleNamespace(observation=said, episode=episode) for episode in episodes]

    made.task.observe = observe


def dataset(section, tokenizer, size=4, max_length=500):
    task = parse_task(section).build()
    encode = environments.prompt_encoder(Prompt(), tokenizer, False, max_length)
    return environments.TaskDataset(lambda index: task.train_problem(index, 0), size, encode, task)


def test_data_pass_through_nemo_rls_loader(tokenizer):
    from nemo_rl.data.collate_fn import rl_collate_fn
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = dataset({"name": "knights_knaves"}, tokenizer)
    batch = next(iter(StatefulDataLoader(data, batch_size=3, shuffle=False, collate_fn=rl_collate_fn)))
    problem = batch["extra_env_info"][1]["problem"]
    message = batch["message_log"][1][0]
    assert tokenizer.decode(message["token_ids"]).replace(" ", "") == problem["question"].replace(" ", "")
    assert batch["length"][1] == len(message["token_ids"])
    assert batch["loss_multiplier"].tolist() == [1.0] * 3
    assert set(batch["task_name"]) == {environments.TASK_NAME}


def test_a_prompt_that_is_too_long_is_cut_and_left_out_of_the_loss(tokenizer):
    row = dataset({"name": "knights_knaves"}, tokenizer, max_length=10)[0]
    assert row["loss_multiplier"] == 0.0
    assert row["length"] == len(row["message_log"][0]["token_ids"]) == task_data.SHORTENED


def test_validation_rewards_are_the_accuracy_alone():
    right = "<think>one and one</think><answer>2</answer>"
    logs = [log_of(right), log_of("2")]
    section = {"name": "knights_knaves"}
    trained = environment(section, {"accuracy": 1.0, "format": 0.5}).made.step(logs, [INFO, INFO])
    validated = environment(section, {"accuracy": 1.0}).made.step(logs, [INFO, INFO])
    assert trained.rewards.tolist() == [1.5, 0.0]
    assert validated.rewards.tolist() == [1.0, 0.0]
    assert trained.terminateds.all()
    assert trained.answers == ["2", None]


def test_a_reward_that_abstains_is_no_number_and_in_turns_waits_for_the_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def judge(response): return None if 'x' in response else 1.0\n")
    rewards = {"accuracy": 0.0, "mine.py:judge": 1.0}
    logs = [log_of("x"), log_of("2")]
    made = environment({"name": "math"}, rewards).made
    found = made.step(logs, [INFO, INFO]).rewards
    assert found[1] == 1.0
    assert found[0].isnan()
    assert made.take_rewards()["reward/abstained"] == 0.5
    made = environment(SEARCH, rewards).made
    observes(made, [], False, True)
    first = made.step([logs[0]], [INFO])
    assert first.rewards.tolist() == [0.0]
    assert made.step([logs[0]], first.metadata).rewards.isnan().all()


def test_a_response_prefix_begins_the_text_of_the_first_turn():
    prompt = {"response_prefix": "The answer is \\boxed{"}
    made = environment({"name": "math"}, {"accuracy": 1.0}, prompt=prompt).made
    step = made.step([log_of("2}."), log_of("3}.")], [INFO, INFO])
    assert step.rewards.tolist() == [1.0, 0.0]
    assert step.answers == ["2", "3"]
    made = environment(SEARCH, {"accuracy": 1.0}, prompt={"response_prefix": "<search>"}).made
    observes(made, seen := [], False, True)
    log = log_of("a</search>")
    made.step([log], [INFO])
    log += [{"role": "environment", "content": "A"}, {"role": "assistant", "content": "<search>b</search>"}]
    made.step([log], [INFO])
    assert seen == ["<search>a</search>", "<search>b</search>"]


def test_a_users_rewards_and_task_arrive_as_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the files are not
    task = """
from nemo_grpo.tasks.knights_knaves import KnightsKnaves, KnightsKnavesConfig
class Mine(KnightsKnavesConfig):
    name: str
    def build(self): return KnightsKnaves(self)
"""
    files = {"r.py": "def length(response, prompt): return len(response) + len(prompt)", "t.py": task}
    logs = [log_of("two", "<chat>1 + 1?")]
    made = environment({"name": "t.py:Mine"}, {"accuracy": 1.0, "r.py:length": 0.5}, own_files=files).made
    assert made.step(logs, [INFO]).rewards.tolist() == [0.5 * (3 + len("1 + 1?"))]
    made.shutdown()


class Scripted:
    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.stop_strings = tokenizer, turns, []

    def __call__(self, _policy, data, batch, tokenizer, **_):
        self.stop_strings.append(list(data["stop_strings"]))
        generated = []
        for log in batch["message_log"]:
            text = self.turns[sum(message["role"] == "assistant" for message in log)]
            generated.append(torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]))
            log.append({"role": "assistant", "content": text, "token_ids": generated[-1]})
        return batch, generated, {"_response_truncated": torch.zeros(len(generated), dtype=torch.bool)}


def rollout(section, rewards, tokenizer, turns, monkeypatch, max_seq_len=2000, max_turns=3):
    from nemo_rl.data.collate_fn import rl_collate_fn
    from nemo_rl.experience import rollouts

    batch = rl_collate_fn([dataset(section, tokenizer)[0]])
    batch["message_log"] = [list(log) for log in batch["message_log"]]
    scripted = Scripted(tokenizer, turns)
    monkeypatch.setattr(rollouts, "generate_responses", scripted)
    monkeypatch.setattr(rollouts.ray, "get", lambda futures: [future() for future in futures])
    final, metrics = rollouts.run_multi_turn_rollout(
        None,
        batch,
        tokenizer,
        {environments.TASK_NAME: environment(section, rewards, reserved_texts(tokenizer))},
        max_seq_len=max_seq_len,
        max_rollout_turns=max_turns,
    )
    return final, metrics, scripted


def test_nemo_rls_rollout_alternates_turns_and_observations(tokenizer, monkeypatch):
    problem = parse_task(SEARCH).build().train_problem(0, 0)
    turns = ["<search>who</search>", "<search></search>", f"<answer>{problem.answer}</answer>"]
    final, _, scripted = rollout(SEARCH, {"answer": 1.0}, tokenizer, turns, monkeypatch)
    log = final["message_log"][0]
    assert [message["role"] for message in log] == ["user", *(("assistant", "environment") * 3)]
    assert "<information>" in log[2]["content"]
    assert "Error: the query is empty." in log[4]["content"]
    assert log[6]["content"] == ""
    assert final["total_reward"].tolist() == [1.0]
    assert scripted.stop_strings == [[["</search>", "</answer>"]]] * 3


def test_a_passage_cannot_end_the_response_or_pad_it(tokenizer, monkeypatch, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "contents": "who\\nwho<eos> is <pad>it"}\n')
    section = SEARCH | {"corpus": str(tmp_path / "corpus.jsonl")}
    turns = ["<search>who</search>", "<answer>x</answer>"]
    final, _, _ = rollout(section, {"answer": 1.0}, tokenizer, turns, monkeypatch)
    observed = final["message_log"][0][2]
    assert "who< eos> is < pad>it" in observed["content"]
    assert not {1, 2} & set(observed["token_ids"].tolist())


def test_the_environments_are_told_the_tokenizers_marks(tokenizer, monkeypatch):
    started = []
    monkeypatch.setattr(environments, "start_environment", started.append)
    recipe = load_recipe(Path("recipes/quickstart_search_qa.yaml"), ["grpo.max_rollout_turns=4"])
    config = types.SimpleNamespace(data={"max_input_seq_length": 500}, grpo={"max_rollout_turns": 4})
    run = ClusterRun(recipe, config)
    for encoder in (tokenizer, types.SimpleNamespace(tokenizer=tokenizer)):
        environments.setup_data(run, task_data.read_problems(run), encoder)
    assert [made["reserved"] for made in started] == 4 * [["<eos>", "<pad>"]]


def test_equal_scores_are_equal_rewards_after_any_number_of_turns(tokenizer, monkeypatch):
    problem = parse_task(SEARCH).build().train_problem(0, 0)
    right = f"<answer>{problem.answer}</answer>"
    rewards = {"answer": 0.7, "accuracy": 0.2}  # -0.7 until the answer is there, then 0.9
    totals = [
        rollout(SEARCH, rewards, tokenizer, turns, monkeypatch)[0]["total_reward"].item()
        for turns in ([right], ["<search>who</search>", right])
    ]
    assert totals[0] == totals[1]
    assert totals[0] == pytest.approx(0.9, abs=2e-6)


@pytest.mark.parametrize(("max_turns", "max_seq_len"), [(1, 2000), (3, 230)], ids=["turns", "tokens"])
def test_a_response_that_is_cut_off_between_turns_is_wrong(tokenizer, monkeypatch, max_turns, max_seq_len):
    turns = ["<search>who</search>"] * 3
    final, _, _ = rollout(
        SEARCH, {"answer": 1.0}, tokenizer, turns, monkeypatch, max_seq_len=max_seq_len, max_turns=max_turns
    )
    assert final["total_reward"].tolist() == [-1.0]


@pytest.mark.parametrize(
    ("variant", "overrides", "expected"),
    [
        ("grpo", [], 2 * 2),
        ("dapo", ["grpo.use_dynamic_sampling=true"], 2 * 2 * 10),
        ("dapo", ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5"], 2 * 3 * 10),
        ("gpg", ["grpo.use_dynamic_sampling=true"], 2 * 2 * 21),
        ("grpo", ASYNC, 2 * 2 * task_data.ASYNC_SPARE),
    ],
)
def test_data_last_for_every_step_at_the_most_draws(variant, overrides, expected, tmp_path):
    loss_fn = {"variant": variant, "use_importance_sampling_correction": overrides == ASYNC}
    assert task_data.num_prompts(toy_run(tmp_path, loss_fn, *overrides)) == expected


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.max_val_samples=10000", "grpo.val_batch_size=10000"], "grpo.max_val_samples=10000: "),
        (["nemo_grpo.task={name: math, train_files: [absent.jsonl]}"], "absent.jsonl is missing"),
        (["nemo_grpo.task={name: math}"], "no training problems"),
    ],
)
def test_what_the_tasks_files_lack_is_refused_before_ray_starts(overrides, message, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(trainer, "model_config", lambda _run: None)
    monkeypatch.setattr("nemo_rl.distributed.virtual_cluster.init_ray", None)
    run = toy_run(tmp_path, {"variant": "grpo"}, "grpo.val_period=1", *overrides)
    with pytest.raises(UserError, match=message):
        trainer.start(run)


def test_image_prompts_have_no_prefix():
    with pytest.raises(UserError, match="response_prefix"):
        task_data.check_image_prompt(Prompt(response_prefix="<think>"))
