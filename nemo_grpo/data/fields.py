"""Mappings that turn a published row into an entry (question, answer, metadata), and filters of entries."""

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from nemo_grpo.tasks.rewards.final_answer import last_boxed
from nemo_grpo.tasks.rows import worked_answer

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """A problem that has no id yet. ``images`` are file contents or {"bytes": .., "path": ..} records."""

    question: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()


FieldMapping = Callable[[Row], Entry]


def text(value: Any) -> str:
    """Write a value as text. A whole float becomes an integer, a list gets commas, None becomes ""."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(text, value))
    return str(value).strip()


def columns(
    row: Row,
    *,
    question: str,
    answer: str,
    keep: Sequence[str] = (),
    read: Literal["text", "boxed", "tagged"] = "text",
) -> Entry:
    r"""Map one column to the question and one to the answer.

    Args:
        row: published row.
        question: column of the question.
        answer: column of the answer.
        keep: columns that go to the metadata.
        read: part of the answer column that is the answer. ``text`` is all of it. ``boxed`` is the content of
            the last complete ``\boxed{..}`` or ``\fbox{..}``, or nothing without one. ``tagged`` is the text
            inside ``<answer>`` tags, or all of it without tags.
    """
    problem = text(row[question])
    final = text(row[answer])
    if read == "boxed":
        final = last_boxed(row[answer]) or ""
    elif read == "tagged":
        final = final.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    metadata = {key: row[key] for key in keep if row.get(key) not in (None, "")}
    return Entry(problem, final, metadata)


def chat_row(row: Row, *, prefix: str = "", suffix: str = "", keep: Sequence[str] = ()) -> Entry:
    """Map a row in verl's format: ``prompt`` is a conversation, ``reward_model.ground_truth`` the answer.

    Args:
        row: published row.
        prefix: instructions before the question, removed if present.
        suffix: instructions after the question, removed if present.
        keep: keys of ``extra_info`` that go to the metadata.
    """
    question = text(row["prompt"][-1]["content"])
    question = question.removeprefix(prefix.strip()).removesuffix(suffix.strip()).strip()
    extra = row.get("extra_info") or {}
    metadata = {key: extra[key] for key in keep if extra.get(key) is not None}
    return Entry(question, text(row["reward_model"]["ground_truth"]), metadata)


def worked(row: Row, *, question: str, answer: str) -> Entry:
    """Map a row as in GSM8K, where the answer follows ``####`` at the end of the solution."""
    solution, final = worked_answer(text(row[answer])) or ("", "")
    return Entry(text(row[question]), final, {"solution": solution})


def dialogue(row: Row) -> Entry:
    """Map Open-Reasoner-Zero's pair [{"value": question}, {"ground_truth": {"value": answer}}]."""
    question, reply = row["row"]
    return Entry(text(question["value"]), text(reply["ground_truth"]["value"]))


def short_answers(row: Row) -> Entry:
    """Map an open-domain question. Any of ``golden_answers`` is correct; reports show the first one."""
    answers = [text(answer) for answer in row["golden_answers"] if text(answer)]
    return Entry(text(row["question"]), answers[0] if answers else "", {"answers": answers})


def puzzle(row: Row) -> Entry:
    """Map a puzzle of knights and knaves. Its answer is the numbered list of who is what."""
    names = list(row["names"])
    solution = [bool(value) for value in row["solution"]]
    metadata = {"names": names, "solution": solution, "num_people": len(names)}
    return Entry(text(row["quiz"]), text(row["solution_text_format"]), metadata)


def picture(row: Row, *, image: str = "image", **options: Any) -> Entry:
    """Map a question about an image, or about a list of images; see `columns`."""
    images = row[image] if isinstance(row[image], list) else [row[image]]
    return replace(columns(row, **options), images=tuple(images))


def offered_choices(row: Row) -> Entry:
    """Map a row of SAT as VisualThinker-R1-Zero's process_dataset.py does: the question lists the choices.

    Deviation: that script shuffles the choices anew in every run. Here their order depends only on the
    question, so that the data are the same everywhere.
    """
    answers = [text(answer) for answer in row["answers"]]
    random.Random(text(row["question"])).shuffle(answers)
    offered = f"{', '.join(answers[:-1])} or {answers[-1]}"
    question = (
        f"Answer in natural language. {text(row['question'])} Choose between the following options: {offered}"
    )
    metadata = {"question_type": row["question_type"]}
    return Entry(question, text(row["correct_answer"]), metadata, tuple(row["image_bytes"]))


Keep = Callable[[Entry], bool]


@dataclass(frozen=True)
class Filter:
    """A rule that keeps or drops entries, and the passage of the paper that asks for it.

    Attributes:
        rule: the rule in words, for the manifest.
        cited: the passage, for the manifest.
        build: makes the function that tests an entry. It is called once per run, because the function may
            remember earlier entries.
    """

    rule: str
    cited: str
    build: Callable[[], Keep]


def complete() -> Filter:
    """Keep entries that have a question and an answer. It is the first filter of every data set."""

    def is_complete(entry: Entry) -> bool:
        return bool(entry.question.strip() and entry.answer.strip())

    return Filter("question and answer are not empty", "file format", lambda: is_complete)


def levels(names: Iterable[str], cited: str) -> Filter:
    """Keep entries whose metadata's ``level`` is one of these."""
    allowed = frozenset(names)

    def has_level(entry: Entry) -> bool:
        return str(entry.metadata.get("level")) in allowed

    return Filter(f"level is one of {', '.join(sorted(allowed))}", cited, lambda: has_level)


def short_solution(max_words: int, cited: str) -> Filter:
    """Keep entries whose metadata's ``solution`` has at most ``max_words`` words separated by white space."""

    def is_short(entry: Entry) -> bool:
        solution = str(entry.metadata.get("solution", ""))
        return len(solution.split()) <= max_words

    return Filter(f"solution has at most {max_words} words", cited, lambda: is_short)


def one_image(cited: str) -> Filter:
    """Keep entries with one image."""

    def has_one_image(entry: Entry) -> bool:
        return len(entry.images) == 1

    return Filter("one image", cited, lambda: has_one_image)


def unique_questions(cited: str) -> Filter:
    """Keep the first of entries with equal images and questions, where white space does not count."""

    def build() -> Keep:
        earlier_keys: set[object] = set()

        def is_new(entry: Entry) -> bool:
            # An image may be a dict, which has no hash; its repr has one.
            key = (" ".join(entry.question.split()), repr(entry.images))
            if key in earlier_keys:
                return False
            earlier_keys.add(key)
            return True

        return is_new

    return Filter("first of equal questions", cited, build)


def first(count: int, cited: str) -> Filter:
    """Keep the first ``count`` entries."""

    def build() -> Keep:
        numbers = itertools.count()

        def is_among_the_first(_entry: Entry) -> bool:
            return next(numbers) < count

        return is_among_the_first

    return Filter(f"first {count}", cited, build)


MAPPINGS: dict[str, Callable[..., Entry]] = {
    "columns": columns,
    "chat_row": chat_row,
    "worked": worked,
    "dialogue": dialogue,
    "short_answers": short_answers,
    "puzzle": puzzle,
    "picture": picture,
    "offered_choices": offered_choices,
}
"""Name in `sources.yaml` -> function of a row and the options there."""
FILTERS: dict[str, Callable[..., Filter]] = {
    "levels": levels,
    "short_solution": short_solution,
    "one_image": one_image,
    "unique_questions": unique_questions,
    "first": first,
}
"""Name in `sources.yaml` -> function of the options there."""
