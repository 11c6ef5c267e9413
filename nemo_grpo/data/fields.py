"""From a published row to an entry: question, answer, metadata.

Every function here makes a ``Mapping``: row -> `Entry`, or None for a row that is not a problem at all.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_grpo.tasks.jsonl import worked_answer
from nemo_grpo.tasks.rewards.final_answer import last_boxed

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """A problem without its id; ``images`` are file contents or {"bytes": .., "path": ..} records."""

    question: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()


FieldMapping = Callable[[Row], Entry]


def text(value: Any) -> str:
    """An answer as text: whole floats as integers, a list of one as its element, None as nothing."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(text, value))
    return str(value).strip()


def boxed(solution: str) -> str:
    r"""The content of the last complete ``\boxed{..}`` (or ``\fbox``); empty if there is none."""
    return last_boxed(solution) or ""


def tagged(solution: str) -> str:
    """The text inside ``<answer>`` tags; the whole text if there are none."""
    inside = solution.rpartition("<answer>")[2].partition("</answer>")[0]
    return inside.strip()


def columns(
    question: str, answer: str, *, keep: Sequence[str] = (), read: Callable[[Any], str] = text
) -> FieldMapping:
    """One column is the question, one the answer; columns of ``keep`` go to the metadata.

    Args: read: makes the answer of the answer column's value.
    """

    def entry(row: Row) -> Entry:
        metadata = {key: row[key] for key in keep if row.get(key) not in (None, "")}
        return Entry(text(row[question]), read(row[answer]), metadata)

    return entry


def chat_row(*, prefix: str = "", suffix: str = "", keep: Sequence[str] = ()) -> FieldMapping:
    """Rows for verl: ``prompt`` is a conversation, ``reward_model.ground_truth`` the answer.

    Args: prefix, suffix: instructions around the question, removed if present.
          keep: keys of ``extra_info`` that go to the metadata.
    """

    def entry(row: Row) -> Entry:
        question = text(row["prompt"][-1]["content"])
        question = question.removeprefix(prefix.strip()).removesuffix(suffix.strip()).strip()
        extra = row.get("extra_info") or {}
        metadata = {key: extra[key] for key in keep if extra.get(key) is not None}
        return Entry(question, text(row["reward_model"]["ground_truth"]), metadata)

    return entry


def worked(question: str, answer: str) -> FieldMapping:
    """One column is the question, one the solution that ends in ``#### answer``: GSM8K."""

    def entry(row: Row) -> Entry:
        solution, final = worked_answer(text(row[answer])) or ("", "")
        return Entry(text(row[question]), final, {"solution": solution})

    return entry


def dialogue(row: Row) -> Entry:
    """Open-Reasoner-Zero: a pair [{"value": question}, {"ground_truth": {"value": answer}}]."""
    question, reply = row["row"]
    return Entry(text(question["value"]), text(reply["ground_truth"]["value"]))


def short_answers(row: Row) -> Entry:
    """Open-domain questions: any of ``golden_answers`` is correct; the first is the answer shown."""
    answers = [text(answer) for answer in row["golden_answers"] if text(answer)]
    return Entry(text(row["question"]), answers[0] if answers else "", {"answers": answers})


def puzzle(row: Row) -> Entry:
    """Knights and knaves: the numbered identities are the answer."""
    names, solution = list(row["names"]), [bool(value) for value in row["solution"]]
    metadata = {"names": names, "solution": solution, "num_people": len(names)}
    return Entry(text(row["quiz"]), text(row["solution_text_format"]), metadata)


def picture(
    question: str, answer: str, *, image: str = "image", keep: Sequence[str] = (), tags: bool = False
) -> FieldMapping:
    """A question about an image, or about a list of images.

    Args: tags: the answer stands inside ``<answer>`` tags.
    """
    plain = columns(
        question, answer, keep=keep, read=lambda value: tagged(text(value)) if tags else text(value)
    )

    def entry(row: Row) -> Entry:
        images = row[image] if isinstance(row[image], list) else [row[image]]
        found = plain(row)
        return Entry(found.question, found.answer, found.metadata, tuple(images))

    return entry


def offered_choices(row: Row) -> Entry:
    """SAT, worded as VisualThinker-R1-Zero's process_dataset.py words it: the question offers its answers.

    Deviation: it shuffles them anew in every run; here the question decides their order.
    """
    answers = [text(answer) for answer in row["answers"]]
    random.Random(text(row["question"])).shuffle(answers)
    offered = f"{', '.join(answers[:-1])} or {answers[-1]}"
    question = (
        f"Answer in natural language. {text(row['question'])} Choose between the following options: {offered}"
    )
    metadata = {"question_type": row["question_type"]}
    return Entry(question, text(row["correct_answer"]), metadata, tuple(row["image_bytes"]))
