"""Notes on a recipe's problems and prompts before anything is built: counts, repetitions, forms."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_grpo.recipe import Recipe
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem, Prompt, Task, encode_prompt
from nemo_grpo.tasks.jsonl import question_of
from nemo_grpo.tasks.mathematics import MathematicalAnswers

ASKED_FORM = re.compile(r"(?:after|of the form|in the form|format)\W{0,3}(Answer:|####)")
"""Instructions of verl's data sets (DAPO-Math-17k, GSM8K) for a form that the maths grader does not read."""
PREPARED = {"Answer:": "dapo-math-17k", "####": "gsm8k"}
"""Form asked for -> the data set that `nemo-grpo data prepare` writes without the instruction."""
NUM_LOOKED_AT = 1000
"""Problems whose questions are searched for an instruction."""
OPENING = "<think>"
TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Files of a model's folder that may hold its chat template."""


def data_notes(
    recipe: Recipe, task: Task, trained: Sequence[Problem], kept: Sequence[Problem]
) -> Iterator[str]:
    """Yield probable mistakes in the problems, and in how they are asked.

    Args: task: the recipe's.  trained: problems of train_files.  kept: those of them that are not held out.
    """
    prompts = recipe.grpo.num_prompts_per_step
    if kept and prompts > len(kept):
        yield (
            f"grpo.num_prompts_per_step={prompts}: nemo_grpo.task.train_files has {len(kept)} problems, so a "
            f"step trains on some of them twice; use {len(kept)} or fewer"
        )
    if len(kept) < len(trained):
        yield (
            f"nemo_grpo.task.train_files: {len(trained) - len(kept)} of {len(trained)} problems are in "
            f"validation_files, too; training leaves them out and has {len(kept)}"
        )
    yield from _repetitions(kept)
    yield from _unread_forms(task, kept)
    if kept:
        yield from _think_tags(recipe, kept[0])


def _repetitions(problems: Sequence[Problem]) -> Iterator[str]:
    """Yield notes on questions that come several times, and on those with several answers."""
    answers: dict[str, set[str]] = {}
    for problem in problems:
        answers.setdefault(repr((question_of(problem), problem.history)), set()).add(problem.answer.strip())
    if len(answers) < len(problems):
        yield (
            f"nemo_grpo.task.train_files: {len(problems)} problems are {len(answers)} different questions, "
            "so an epoch repeats some; remove the repeated rows if that is not meant"
        )
    unclear = {question for question, given in answers.items() if len(given) > 1}
    if unclear:
        first = next(p for p in problems if repr((question_of(p), p.history)) in unclear)
        yield (
            f"nemo_grpo.task.train_files: questions with several answers: {len(unclear)}, such as "
            f"{first.question[:80]!r}; no response is right for all of their rows: correct the file"
        )


def _unread_forms(task: Task, problems: Sequence[Problem]) -> Iterator[str]:
    """Yield a note if questions ask for a form of the answer that the maths grader never reads."""
    if not problems or not isinstance(task, MathematicalAnswers):
        return
    looked_at = problems[:NUM_LOOKED_AT]
    asked = [match[1] for problem in looked_at if (match := ASKED_FORM.search(problem.question))]
    if asked:
        form = max(set(asked), key=asked.count)
        yield (
            f"nemo_grpo.task.train_files: {asked.count(form)} of {len(looked_at)} questions ask for "
            f"{form!r}, which the task never reads as an answer: accuracy and format stay 0; "
            f"`nemo-grpo data prepare {PREPARED[form]}` writes that data set without the instruction, or "
            "take it out of your file and let nemo_grpo.prompt ask for \\boxed{}"
        )


def _think_tags(recipe: Recipe, problem: Problem) -> Iterator[str]:
    """Yield a note if the prompt opens the thinking and the task does not know it, or the other way round."""
    own, task = recipe.nemo_grpo, recipe.task
    is_open = getattr(task, "think_is_open", None)
    folder = Path(recipe.policy.tokenizer.name or recipe.policy.model_name or "")
    # NeMo-RL may put another template in the place of the tokenizer's, or give it arguments
    is_replaced = recipe.policy.tokenizer.chat_template not in (None, "default")
    is_replaced = is_replaced or bool(recipe.policy.tokenizer.chat_template_kwargs)
    if is_open is None or getattr(task, "form", None) == "boxed":
        return
    if is_replaced or task.needs_images or not folder.is_dir():
        return
    opens = _prompt_opens_thinking(folder, own.prompt, problem)
    if opens and not is_open:
        yield (
            f"nemo_grpo.task.think_is_open=false: the chat template of {folder} ends with {OPENING}, so "
            "responses lack the tag and their format is 0; set nemo_grpo.task.think_is_open=true"
        )
    if opens is False and is_open:
        yield (
            f"nemo_grpo.task.think_is_open=true: the prompt does not end with {OPENING}, neither by the chat "
            f"template of {folder} nor by nemo_grpo.prompt.response_prefix, so a tag that a response opens "
            "itself is its second; set nemo_grpo.task.think_is_open=false, or end the prefix with the tag"
        )


def _prompt_opens_thinking(folder: Path, prompt: Prompt, problem: Problem) -> bool | None:
    """True if the response begins within a thought; None: the tokenizer cannot say."""
    before, _, after = prompt.response_prefix.rpartition("</think>")
    if before or OPENING in after:
        return OPENING in after
    files = [folder / name for name in TEMPLATES]
    templates = [file.read_text(errors="replace") for file in files if file.is_file()]
    if not prompt.use_chat_template or not any(OPENING in text for text in templates):
        return False if templates else None  # no need to load the tokenizer, which takes seconds
    from nemo_grpo.support.hf_folder import load_tokenizer

    try:
        tokenizer = load_tokenizer(folder)
        tokens = encode_prompt(tokenizer, prompt, problem)
    except UserError:  # the run's own check says more
        return None
    return str(tokenizer.decode(tokens, skip_special_tokens=False)).rstrip().endswith(OPENING)
