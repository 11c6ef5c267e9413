"""Trial of a user's own task before a run: its methods, components, problems and demonstrations."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from nemo_grpo.support import extensions
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.base import Problem, Task, TaskConfig
from nemo_grpo.tasks.grading import OwnTaskWorkers, ScoreFailed
from nemo_grpo.tasks.prompts import PROMPTS_CHECKED
from nemo_grpo.tasks.response import render_response

KEY = "nemo_grpo.task"
METHODS = ("train_problem", "validation_problems", "demonstration", "extract", "score")
"""Methods of every task; an engine or a command calls each of them."""
REQUIRED_COMPONENTS = ("accuracy", "format")
NUM_SCORED = 2
"""Training problems, and validation problems, whose responses are scored."""


def try_own_task(config: TaskConfig, seed: int, num_validation: int, *, shows_demonstrations: bool) -> None:
    """Call the methods of a user's own task as a run does, and refuse a task with which the run would fail.

    As in a run, worker processes with limits compute its scores and answers.

    Args:
        config: the task's parameters.
        seed: seed of the training problems.
        num_validation: problems that the run validates on; 0: it never validates.
        shows_demonstrations: the run learns from demonstrations.

    Raises:
        UserError: a run would end with this task, or train on the problems that measure it.
    """
    _check_components(config)
    task = _built(config)
    _check_methods(config, task)
    with _explained(config, "train_problem"):
        # Of an endless stream, try as many problems as a run encodes in advance.
        count = getattr(task, "num_train_problems", PROMPTS_CHECKED)
        training = [_checked(task.train_problem(index, seed), "train_problem") for index in range(count)]
    held_out: list[Problem] = []
    if num_validation:
        with _explained(config, "validation_problems"):
            held_out = [
                _checked(problem, "validation_problems")
                for problem in task.validation_problems(num_validation)
            ]
    _check_disjoint(training, held_out)
    scored_problems = training[:NUM_SCORED] + held_out[:NUM_SCORED]
    demonstrations = _demonstrations(task, scored_problems) if shows_demonstrations else []
    # Use the same workers as a run, so that code that needs this process, or too much time, fails now.
    workers = OwnTaskWorkers(config.model_dump(mode="json"))
    try:
        for problem in scored_problems:
            for response in ("", problem.answer, render_response("so", problem.answer)):
                _score(workers, problem, response)
        for problem, demonstration in zip(scored_problems, demonstrations, strict=False):
            _check_demonstration(workers, problem, demonstration)
    finally:
        workers.pool.close()


def _check_methods(config: TaskConfig, task: Task) -> None:
    missing_methods = [name for name in METHODS if not callable(getattr(task, name, None))]
    if missing_methods:
        raise UserError(
            f"{KEY}: {type(task).__name__} of {config.name} has no method {', '.join(missing_methods)}; "
            "write it"
        )


@contextmanager
def _explained(config: TaskConfig, name: str) -> Iterator[None]:
    """Turn an error of the user's code in the block into a UserError that names the line of the code."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        place = extensions.place_of(error, config.name.rpartition(":")[0])
        raise UserError(f"{KEY}: {name} of {config.name} fails: {place}") from None


def _check_components(config: TaskConfig) -> None:
    for name in REQUIRED_COMPONENTS:
        if name not in config.reward_components:
            raise UserError(
                f"{KEY}: {config.name} declares no component {name!r}; add it to reward_components "
                "(the default has accuracy and format) and to score"
            )


def _built(config: TaskConfig) -> Task:
    with _explained(config, "build"):
        return config.build()


def _checked(problem: object, method: str) -> Problem:
    if not isinstance(problem, Problem):
        raise UserError(f"{KEY}: {method} returns {problem!r:.80}; it must be a nemo_grpo.tasks.base.Problem")
    return problem


def _check_disjoint(training: Iterable[Problem], held_out: Sequence[Problem]) -> None:
    """Refuse problems that are both in training and in validation, by their id or their text."""
    held_out_ids = {problem.id for problem in held_out}
    held_out_texts = {_text_of(problem) for problem in held_out}
    for problem in training:
        if problem.id in held_out_ids or _text_of(problem) in held_out_texts:
            raise UserError(
                f"{KEY}: problem {problem.id!r} is in training and in validation, whose accuracy would be "
                "training's; keep a part of the problems for validation_problems alone (is_held_out of "
                "nemo_grpo.tasks.base chooses a fifth)"
            )


def _text_of(problem: Problem) -> str:
    question = " ".join(problem.question.split())
    return repr((question, problem.history, problem.metadata.get("images")))


def _demonstrations(task: Task, problems: Sequence[Problem]) -> list[str]:
    responses = []
    for problem in problems:
        with _explained(task.config, "demonstration"):
            response = task.demonstration(problem, random.Random(0))
        if not isinstance(response, str):
            raise UserError(f"{KEY}: demonstration returns {response!r:.80}; it must be the response's text")
        responses.append(response)
    return responses


def _score(workers: OwnTaskWorkers, problem: Problem, response: str) -> dict[str, float]:
    try:
        scores = workers.score(problem, response)
        workers.extract(response)
    except ScoreFailed as error:
        raise UserError(
            f"{KEY}: {error}, for the response {response!r} to problem {problem.id!r}; correct score and "
            "extract, which are called for any response"
        ) from None
    return scores


def _check_demonstration(workers: OwnTaskWorkers, problem: Problem, demonstration: str) -> None:
    accuracy = _score(workers, problem, demonstration)["accuracy"]
    if accuracy < 1:
        raise UserError(
            f"{KEY}: the demonstration of problem {problem.id!r} has accuracy {accuracy:g}; return a correct "
            f"response in the form that score reads, instead of {demonstration!r:.200}"
        )
