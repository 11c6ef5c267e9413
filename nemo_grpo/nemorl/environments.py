"""A recipe's task on NeMo-RL: its problems as data sets, its rewards and its turns as an environment.

One environment serves every task, because a task is plain functions. It runs in a Ray actor; each response
carries its problem as NeMo-RL's ``extra_env_info``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
import torch

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.host_api import ACTOR_PYTHONS, IMAGES
from nemo_grpo.nemorl.rewards import RolloutRewards, ValidationRewards
from nemo_grpo.support.extensions import receive_files
from nemo_grpo.tasks import Problem, Prompt, encode_prompt, parse_task
from nemo_grpo.tasks.base import Episode, MultiTurnTask, make_ready, tags_of
from nemo_grpo.tasks.grading import extracted_answer
from nemo_grpo.tasks.prompts import check_image_prompt, image_message
from nemo_grpo.tasks.scoring import Scorer
from nemo_grpo.tasks.special_tokens import refuse_special_tags, reserved_texts

if TYPE_CHECKING:
    from nemo_grpo.nemorl.config import ClusterRun

TASK_NAME = "nemo_grpo"
"""NeMo-RL's name of the task, for the table of environments."""

ACTOR = f"{__name__}.TaskEnvironment"
NUM_THREADS = 16
"""Responses scored in parallel; comparing mathematics waits for worker processes."""
ASYNC_SPARE = 10
"""Asynchronous training makes one pass over its data and skips prompts that have no step yet, fail, or grow
too old. Its stream is this many times as long as it needs; problems are generated on demand."""
REWARD_UNITS = 2**18
"""A response's running reward is rounded to a multiple of 1 / this. NeMo-RL adds up its differences in
float32, which is then exact: equal scores stay equal after any number of turns."""
SHORTENED = 4
"""Tokens kept of a prompt that is too long; it is not trained on."""

_ENVIRONMENTS = "nemo_rl.environments"
EnvironmentInterface = compat.import_name(f"{_ENVIRONMENTS}.interfaces:EnvironmentInterface")
EnvironmentReturn = compat.import_name(f"{_ENVIRONMENTS}.interfaces:EnvironmentReturn")


class TaskProblems(NamedTuple):
    """Attributes: task: the recipe's.  held_out: its validation problems; none if the run never validates."""

    task: Any
    held_out: list[Problem]


def read_problems(run: ClusterRun) -> TaskProblems:
    """Read the task's files and check all that needs neither Ray, tokenizer nor GPUs."""
    own, grpo = run.recipe.nemo_grpo, run.recipe.grpo
    task = run.recipe.task.build()
    if run.has_images:
        compat.require(IMAGES)
        check_image_prompt(own.prompt)
    task.train_problem(0, grpo.seed)
    make_ready(task)
    return TaskProblems(task, task.validation_problems(grpo.num_val_problems) if grpo.validates else [])


def setup_data(
    run: ClusterRun, problems: TaskProblems, encoder: Any
) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """Build training and validation data, and the environment of each.

    Training rewards are weighted as the recipe says. Validation returns the accuracy alone, so that NeMo-RL's
    ``validation/accuracy`` is an accuracy whatever the training rewards are; these are kept beside it.

    Args:    encoder: the tokenizer, or the processor for tasks with images.
    Returns: (data, validation data, {task: environment}, {task: environment}), as NeMo-RL's trainers take it.
    """
    recipe, config = run.recipe, run.master_config
    own, grpo, (task, held_out) = recipe.nemo_grpo, recipe.grpo, problems
    tokenizer = getattr(encoder, "tokenizer", encoder)
    refuse_special_tags(tokenizer, tags_of(task))
    encode = prompt_encoder(own.prompt, encoder, run.has_images, config.data["max_input_seq_length"])
    config.data["shuffle"] = False  # `train_problem` orders the problems, by the recipe's data.shuffle
    data = TaskDataset(lambda index: task.train_problem(index, grpo.seed), num_prompts(run), encode, task)
    validation = TaskDataset(held_out.__getitem__, len(held_out), encode, task) if held_out else None
    shared = {
        "task": recipe.task.model_dump(mode="json"),
        "prompt": own.prompt.model_dump(),
        "rewards": dict(own.rewards),
        "own_files": recipe.own_files,
        "max_failed_rewards": own.max_failed_rewards,
        "reserved": list(reserved_texts(tokenizer)),
    }
    trained = start_environment(shared | {"num_generations": grpo.num_generations_per_prompt})
    validated = start_environment(shared | {"validates": True})
    return data, validation, {TASK_NAME: trained}, {TASK_NAME: validated}


def num_prompts(run: ClusterRun) -> int:
    """Count the prompts that the run can draw at most; one epoch is that long."""
    grpo = run.recipe.grpo
    draws = 1
    if grpo.use_dynamic_sampling:
        _, draws = run.recipe.loss_fn.resampling(grpo.dynamic_sampling_max_gen_batches)
    if run.is_async:
        draws = ASYNC_SPARE
    return grpo.max_num_steps * run.num_prompts_per_draw * max(draws, 1)


Encode = Callable[[Problem], dict[str, Any]]
"""A problem -> the parts of NeMo-RL's datum that depend on the prompt."""


class TaskDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Problems by number as NeMo-RL data: the prompt, and what the environment needs."""

    def __init__(self, problem: Callable[[int], Problem], size: int, encode: Encode, task: Any) -> None:
        self.problem, self.size, self.encode = problem, size, encode
        self.stop_texts = list(task.stop_texts) if isinstance(task, MultiTurnTask) else None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        problem = self.problem(index)
        info = {"problem": asdict(problem), "episode": asdict(Episode()), "rewarded": 0.0}
        return {
            **self.encode(problem),
            "extra_env_info": info,
            "idx": index,
            "task_name": TASK_NAME,
            "stop_strings": self.stop_texts,
        }


def prompt_encoder(prompt: Prompt, encoder: Any, has_images: bool, max_prompt_length: int) -> Encode:
    """Choose the function that encodes a problem: the embedded engine's, or NeMo-RL's for images."""
    encode = image_prompt if has_images else text_prompt
    return partial(encode, prompt, encoder, max_length=max_prompt_length)


def text_prompt(prompt: Prompt, tokenizer: Any, problem: Problem, max_length: int) -> dict[str, Any]:
    """Encode one user message; too long a prompt is cut and excluded from the loss."""
    tokens = encode_prompt(tokenizer, prompt, problem)
    fits = len(tokens) < max_length
    kept = tokens if fits else tokens[:SHORTENED]
    message = {"role": "user", "content": tokenizer.decode(kept), "token_ids": torch.tensor(kept)}
    return {"message_log": [message], "length": len(kept), "loss_multiplier": float(fits)}


def image_prompt(prompt: Prompt, processor: Any, problem: Problem, max_length: int) -> dict[str, Any]:
    """Encode prompt and images by NeMo-RL's own function for vision models."""
    datum = {
        "task_name": "avqa",  # a task name whose messages it passes through
        "messages": [image_message(prompt, problem), {"role": "assistant", "content": problem.answer}],
    }
    spec = compat.import_name("nemo_rl.data.interfaces:TaskDataSpec")()
    process = compat.import_name("nemo_rl.data.processors:vlm_hf_data_processor")
    return dict(process(datum, spec, processor, max_length, 0))


class TaskEnvironmentImpl(EnvironmentInterface):  # type: ignore[misc, valid-type]
    """Scores responses and gives the observations between their turns."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Args: config: ``task`` and ``prompt``, the recipe's sections; ``rewards``, component -> weight;
        ``max_failed_rewards``; ``own_files``, `Recipe.own_files`; ``reserved``, special tokens that
        observations must not contain; ``num_generations``, of `RolloutRewards`, or ``validates``, to return
        the accuracy.
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

        Args:    message_log_batch: per response the prompt, then the policy's and the environment's messages.
                 metadata: per response, from `TaskDataset` or the last call.
        Returns: NeMo-RL's `EnvironmentReturn`.
        """
        problems = [Problem(**info["problem"]) for info in metadata]
        opening = self.scorer.first_words
        texts = [opening + "".join(message["content"] for message in log[1:]) for log in message_log_batch]
        scores = self.scorer(problems, texts, self.pool.map)
        numbers = [
            self.rewards.note(problem, score, info.get("response"))
            for problem, score, info in zip(problems, scores, metadata, strict=True)
        ]
        observations, episodes = self._observe(message_log_batch, metadata)
        over = [observation is None for observation in observations]
        totals = [self._total(*one) for one in zip(scores, metadata, over, strict=True)]
        stop_texts = list(self.task.stop_texts) if isinstance(self.task, MultiTurnTask) else None
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": text or ""} for text in observations],
            metadata=[
                {**info, "episode": asdict(episode), "rewarded": total, "response": number}
                for info, episode, total, number in zip(metadata, episodes, totals, numbers, strict=True)
            ],
            next_stop_strings=[None if done else stop_texts for done in over],
            rewards=torch.tensor(
                [total - info["rewarded"] for total, info in zip(totals, metadata, strict=True)]
            ),
            terminateds=torch.tensor(over),
            answers=[extracted_answer(self.task, text) for text in texts],
        )

    def take_rewards(self) -> dict[str, float]:
        """Take the components, see `RolloutRewards.take` and `ValidationRewards.take`."""
        return self.rewards.take()

    def _total(self, score: Mapping[str, float], info: Mapping[str, Any], is_over: bool) -> float:
        if self.validates:
            return score["accuracy"]
        reward = self.scorer.reward(score)
        if math.isnan(reward):  # a function abstains: the whole response decides
            return reward if is_over else float(info["rewarded"])
        return round(reward * REWARD_UNITS) / REWARD_UNITS if isinstance(self.task, MultiTurnTask) else reward

    def _observe(
        self, logs: Sequence[list[dict[str, Any]]], metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[list[str | None], list[Episode]]:
        episodes = [Episode(**info["episode"]) for info in metadata]
        if not isinstance(self.task, MultiTurnTask):
            return [None] * len(logs), episodes
        turns = [(self.scorer.first_words if len(log) == 2 else "") + log[-1]["content"] for log in logs]
        observed = self.task.observe(episodes, turns, self.reserved)
        return [one.observation for one in observed], [one.episode for one in observed]

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


@ray.remote(max_restarts=-1, max_task_retries=-1)  # stateless: a lost call can be repeated
class TaskEnvironment(TaskEnvironmentImpl):
    """`TaskEnvironmentImpl` as a Ray actor."""


def start_environment(config: Mapping[str, Any]) -> Any:
    """Start an actor with a task, in the Python of NeMo-RL's driver."""
    registry = compat.import_name(ACTOR_PYTHONS)
    registry[ACTOR] = registry["nemo_rl.environments.math_environment.MathEnvironment"]
    environments = compat.import_name(f"{_ENVIRONMENTS}.utils:ENV_REGISTRY")
    environments.setdefault(TASK_NAME, {"actor_class_fqn": ACTOR})
    return compat.import_name(f"{_ENVIRONMENTS}.utils:create_env")(TASK_NAME, dict(config))
