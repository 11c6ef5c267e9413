"""A recipe's task on NeMo-RL: its rewards and its turns as an environment, beside its data.

One environment serves every task, because a task is plain functions. It runs in a Ray actor; each response
carries its problem as NeMo-RL's ``extra_env_info``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray
import torch

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.host_api import ACTOR_PYTHONS
from nemo_grpo.nemorl.rewards import RolloutRewards, ValidationRewards
from nemo_grpo.nemorl.task_data import TASK_NAME, TaskDataset, TaskProblems, num_prompts, prompt_encoder
from nemo_grpo.support.extensions import receive_files
from nemo_grpo.tasks import Problem, Prompt, parse_task
from nemo_grpo.tasks.base import Episode, MultiTurnTask, tags_of
from nemo_grpo.tasks.grading import extracted_answer
from nemo_grpo.tasks.scoring import Scorer
from nemo_grpo.tasks.special_tokens import refuse_special_tags, reserved_texts

if TYPE_CHECKING:
    from nemo_grpo.nemorl.config import ClusterRun
    from nemo_grpo.recipe import Recipe

ACTOR = f"{__name__}.TaskEnvironment"
NUM_THREADS = 16
"""Responses scored in parallel; comparing mathematics waits for worker processes."""
REWARD_UNITS = 2**18
"""Units per 1 of reward, to which a response's running reward is rounded. NeMo-RL adds up its differences in
float32, which is then exact: equal scores stay equal after any number of turns."""
_ENVIRONMENTS = "nemo_rl.environments"
EnvironmentInterface = compat.import_name(f"{_ENVIRONMENTS}.interfaces:EnvironmentInterface")
EnvironmentReturn = compat.import_name(f"{_ENVIRONMENTS}.interfaces:EnvironmentReturn")


def setup_data(
    run: ClusterRun, problems: TaskProblems, encoder: Any
) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Build training and validation data, and the environment of each.

    The training environment returns the recipe's weighted rewards. The validation environment returns the
    accuracy, because NeMo-RL logs the mean reward of a validation as ``validation/accuracy``; it notes the
    reward components as metrics of their own.

    Args:
        run: its NeMo-RL configuration is changed: the data are no longer shuffled by NeMo-RL.
        problems: problems of the recipe's task.
        encoder: the tokenizer, or the processor for tasks with images.

    Returns:
        Training data, validation data, {task: environment} of training and of validation.
    """
    recipe = run.recipe
    config = run.master_config
    task = problems.task
    held_out = problems.held_out
    seed = recipe.grpo.seed
    tokenizer = getattr(encoder, "tokenizer", encoder)
    refuse_special_tags(tokenizer, tags_of(task))
    prompt = recipe.nemo_grpo.prompt
    encode = prompt_encoder(prompt, encoder, run.has_images, config.data["max_input_seq_length"])
    # `train_problem` already shuffles the problems if the recipe's data.shuffle asks for it.
    config.data["shuffle"] = False
    data = TaskDataset(lambda index: task.train_problem(index, seed), num_prompts(run), encode, task)
    validation = TaskDataset(held_out.__getitem__, len(held_out), encode, task) if held_out else None
    settings = environment_settings(recipe, tokenizer)
    num_generations = recipe.grpo.num_generations_per_prompt
    training_env = start_environment(settings | {"num_generations": num_generations})
    validation_env = start_environment(settings | {"validates": True})
    return data, validation, {TASK_NAME: training_env}, {TASK_NAME: validation_env}


def environment_settings(recipe: Recipe, tokenizer: Any) -> dict[str, Any]:
    """Return the settings that the environments of training and validation share.

    Their keys: ``task`` and ``prompt`` are the recipe's sections, ``rewards`` gives the weight of each
    component, ``own_files`` the recipe's own Python files, ``max_failed_rewards`` the recipe's limit, and
    ``reserved`` the special tokens that observations must not contain.
    """
    return {
        "task": recipe.task.model_dump(mode="json"),
        "prompt": recipe.nemo_grpo.prompt.model_dump(),
        "rewards": dict(recipe.nemo_grpo.rewards),
        "own_files": recipe.own_files,
        "max_failed_rewards": recipe.nemo_grpo.max_failed_rewards,
        "reserved": list(reserved_texts(tokenizer)),
    }


class TaskEnvironmentImpl(EnvironmentInterface):  # type: ignore[misc, valid-type]
    """Scores responses and gives the observations between their turns."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Build the task and its rewards.

        Args:
            config: the settings of `environment_settings`, and one of two keys: ``num_generations``,
                responses in a group, for training; or ``validates``, true for validation.
        """
        receive_files(config["own_files"])
        self.task = parse_task(config["task"]).build()
        prompt = Prompt.model_validate(config["prompt"])
        self.scorer = Scorer(self.task, config["rewards"], prompt, config["max_failed_rewards"])
        self.reserved = tuple(config["reserved"])
        self.validates = config.get("validates", False)
        self.rewards: RolloutRewards | ValidationRewards
        if self.validates:
            self.rewards = ValidationRewards(config["rewards"])
        else:
            self.rewards = RolloutRewards(config["num_generations"])
        self.pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="score")

    def step(self, message_log_batch: list[list[dict[str, Any]]], metadata: list[dict[str, Any]]) -> Any:
        """Take one turn of every response.

        A turn's reward is the increase of the response's score. NeMo-RL adds up the turns, so that every
        response ends with the score of its whole text, even if it is cut off between turns.

        Args:
            message_log_batch: per response the prompt, then the policy's and the environment's messages.
            metadata: per response, from `TaskDataset` or the last call.

        Returns:
            NeMo-RL's `EnvironmentReturn`.
        """
        problems = [Problem(**info["problem"]) for info in metadata]
        texts = [self._response_text(log) for log in message_log_batch]
        scores = self.scorer(problems, texts, self.pool.map)
        observations, episodes = self._observe(message_log_batch, metadata)
        is_over = [observation is None for observation in observations]
        rewards = []
        next_metadata = []
        for row, info in enumerate(metadata):
            number = self.rewards.note(problems[row], scores[row], info.get("response"))
            total = self._total(scores[row], info, is_over[row])
            rewards.append(total - info["rewarded"])
            episode = asdict(episodes[row])
            next_metadata.append(info | {"episode": episode, "rewarded": total, "response": number})
        stop_texts = list(self.task.stop_texts) if isinstance(self.task, MultiTurnTask) else None
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": text or ""} for text in observations],
            metadata=next_metadata,
            next_stop_strings=[None if ended else stop_texts for ended in is_over],
            rewards=torch.tensor(rewards),
            terminateds=torch.tensor(is_over),
            answers=[extracted_answer(self.task, text) for text in texts],
        )

    def _response_text(self, log: Sequence[Mapping[str, Any]]) -> str:
        """Join the response prefix, and the response's turns and observations."""
        return self.scorer.first_words + "".join(message["content"] for message in log[1:])

    def take_rewards(self) -> dict[str, float]:
        """Take the components, see `RolloutRewards.take` and `ValidationRewards.take`."""
        return self.rewards.take()

    def _total(self, score: Mapping[str, float], info: Mapping[str, Any], is_over: bool) -> float:
        """Return the reward of a response after this turn.

        Args:
            score: components of the whole response so far.
            info: the response's metadata; ``rewarded`` is its reward after the previous turn.
            is_over: this was its last turn.
        """
        if self.validates:
            return score["accuracy"]
        reward = self.scorer.reward(score)
        if math.isnan(reward):
            # A reward function abstains. Before the last turn the response keeps its reward: NeMo-RL adds up
            # the turns, and a NaN of one turn would remain even if the function does not abstain at the end.
            return reward if is_over else float(info["rewarded"])
        # The turns' differences must add up exactly, see `REWARD_UNITS`.
        if isinstance(self.task, MultiTurnTask):
            return round(reward * REWARD_UNITS) / REWARD_UNITS
        return reward

    def _observe(
        self, logs: Sequence[list[dict[str, Any]]], metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[list[str | None], list[Episode]]:
        """Return each response's observation, None if it is over, and the state of its episode."""
        episodes = [Episode(**info["episode"]) for info in metadata]
        if not isinstance(self.task, MultiTurnTask):
            return [None] * len(logs), episodes
        turns = []
        for log in logs:
            is_first_turn = len(log) == 2
            opening = self.scorer.first_words if is_first_turn else ""
            turns.append(opening + log[-1]["content"])
        results = self.task.observe(episodes, turns, self.reserved)
        return [result.observation for result in results], [result.episode for result in results]

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Compute mean reward, share of responses that ended, and their length, for NeMo-RL's evaluation."""

        def mean(key: str) -> float:
            return torch.as_tensor(batch[key], dtype=torch.float32).mean().item()

        return batch, {
            "reward": mean("rewards"),
            "fraction_of_samples_properly_ended": mean("is_end"),
            "num_problems_in_batch": float(len(batch["rewards"])),
            "generation_lengths": mean("generation_lengths"),
        }

    def shutdown(self) -> None:
        """End the threads and the workers of own rewards."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.scorer.close()


# The actor keeps nothing that a rollout needs, so Ray may restart it on any node and repeat a lost call.
@ray.remote(max_restarts=-1, max_task_retries=-1)
class TaskEnvironment(TaskEnvironmentImpl):
    """`TaskEnvironmentImpl` as a Ray actor."""


def start_environment(config: Mapping[str, Any]) -> Any:
    """Start an actor with a task, in the Python of NeMo-RL's driver."""
    registry = compat.import_name(ACTOR_PYTHONS)
    # NeMo-RL runs its environment for mathematics in the driver's Python.
    registry[ACTOR] = registry["nemo_rl.environments.math_environment.MathEnvironment"]
    environments = compat.import_name(f"{_ENVIRONMENTS}.utils:ENV_REGISTRY")
    environments.setdefault(TASK_NAME, {"actor_class_fqn": ACTOR})
    create_environment = compat.import_name(f"{_ENVIRONMENTS}.utils:create_env")
    return create_environment(TASK_NAME, dict(config))
