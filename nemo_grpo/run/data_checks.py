"""Warnings about a recipe's data before a run starts.

They name probable mistakes: too few problems, repeated questions, a form of the answer that the grader does
not read, and a think tag that prompt and task disagree on.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_grpo.recipe import Recipe
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Problem, Prompt, Task, encode_prompt
from nemo_grpo.tasks.jsonl import question_of
from nemo_grpo.tasks.mathematics import MathematicalAnswers

ASKED_FORM = re.compile(r"(?:after|of the form|in the form|format)\W{0,3}(Answer:|####)")
"""Instruction in a question for a form of the answer that the maths grader does not read.

verl's versions of DAPO-Math-17k and GSM8K have such instructions.
"""
PREPARED = {"Answer:": "dapo-math-17k", "####": "gsm8k"}
"""Form of the answer -> data set that `nemo-grpo data prepare` writes without the instruction for it."""
NUM_LOOKED_AT = 1000
"""Number of problems whose questions are searched for an instruction."""
OPENING = "<think>"
"""Tag that opens a response's thinking."""
TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Files of a model's folder that may hold its chat template."""


def data_notes(
    recipe: Recipe, task: Task, file_problems: Sequence[Problem], problems: Sequence[Problem]
) -> Iterator[str]:
    """Yield probable mistakes in the problems and in their prompts.

    Args:
        recipe: Recipe of the run.
        task: Task of the recipe.
        file_problems: All problems of train_files.
        problems: Problems on which the run trains: ``file_problems`` without those in validation_files.
    """
    num_prompts = recipe.grpo.num_prompts_per_step
    if problems and num_prompts > len(problems):
        yield (
            f"grpo.num_prompts_per_step={num_prompts}: nemo_grpo.task.train_files has {len(problems)} "
            f"problems, so a step trains on some of them twice; use {len(problems)} or fewer"
        )
    if len(problems) < len(file_problems):
        num_held_out = len(file_problems) - len(problems)
        yield (
            f"nemo_grpo.task.train_files: {num_held_out} of {len(file_problems)} problems are in "
            f"validation_files, too; training leaves them out and has {len(problems)}"
        )
    yield from _repetitions(problems)
    yield from _unread_forms(task, problems)
    if problems:
        yield from _think_tags(recipe, problems[0])


def _repetitions(problems: Sequence[Problem]) -> Iterator[str]:
    """Yield notes on questions that occur several times, and on questions with several answers."""
    # The earlier turns are a part of the question.
    keys = [repr((question_of(problem), problem.history)) for problem in problems]
    answers: dict[str, set[str]] = {}
    for key, problem in zip(keys, problems, strict=True):
        answers.setdefault(key, set()).add(problem.answer.strip())
    if len(answers) < len(problems):
        yield (
            f"nemo_grpo.task.train_files: {len(problems)} problems are {len(answers)} different questions, "
            "so an epoch repeats some; remove the repeated rows if that is not meant"
        )
    num_ambiguous = sum(len(answers_of_question) > 1 for answers_of_question in answers.values())
    if num_ambiguous:
        examples = [
            problem.question for key, problem in zip(keys, problems, strict=True) if len(answers[key]) > 1
        ]
        yield (
            f"nemo_grpo.task.train_files: questions with several answers: {num_ambiguous}, such as "
            f"{examples[0][:80]!r}; no response is right for all of their rows: correct the file"
        )


def _unread_forms(task: Task, problems: Sequence[Problem]) -> Iterator[str]:
    """Yield a note if questions ask for a form of the answer that the maths grader never reads."""
    if not problems or not isinstance(task, MathematicalAnswers):
        return
    questions = [problem.question for problem in problems[:NUM_LOOKED_AT]]
    matches = [ASKED_FORM.search(question) for question in questions]
    forms = [match[1] for match in matches if match is not None]
    if forms:
        form = max(set(forms), key=forms.count)
        yield (
            f"nemo_grpo.task.train_files: {forms.count(form)} of {len(questions)} questions ask for "
            f"{form!r}, which the task never reads as an answer: accuracy and format stay 0; "
            f"`nemo-grpo data prepare {PREPARED[form]}` writes that data set without the instruction, or "
            "take it out of your file and let nemo_grpo.prompt ask for \\boxed{}"
        )


def _think_tags(recipe: Recipe, problem: Problem) -> Iterator[str]:
    """Yield a note if prompt and task disagree on whether the prompt already opens the think block."""
    task = recipe.task
    is_open = getattr(task, "think_is_open", None)
    if is_open is None or getattr(task, "form", None) == "boxed":
        return
    # NeMo-RL may replace the tokenizer's template, or give it arguments, and this check sees neither.
    tokenizer = recipe.policy.tokenizer
    has_other_template = tokenizer.chat_template not in (None, "default")
    folder = Path(tokenizer.name or recipe.policy.model_name or "")
    if has_other_template or tokenizer.chat_template_kwargs or task.needs_images or not folder.is_dir():
        return
    opens = _prompt_opens_thinking(folder, recipe.nemo_grpo.prompt, problem)
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
    """True if the response begins within a think block; None if the model's folder does not show it."""
    # If the response's prefix has think tags, the last of them decides, whatever the template writes.
    before, _, after = prompt.response_prefix.rpartition("</think>")
    if before or OPENING in after:
        return OPENING in after
    files = [folder / name for name in TEMPLATES]
    templates = [file.read_text(errors="replace") for file in files if file.is_file()]
    # Loading the tokenizer takes seconds, which a template without the tag does not need.
    if not templates:
        return None
    if not prompt.use_chat_template or not any(OPENING in template for template in templates):
        return False
    from nemo_grpo.support.hf_folder import load_tokenizer

    try:
        tokenizer = load_tokenizer(folder)
        tokens = encode_prompt(tokenizer, prompt, problem)
    except UserError:
        # The check at the run's start reports this error.
        return None
    return str(tokenizer.decode(tokens, skip_special_tokens=False)).rstrip().endswith(OPENING)
