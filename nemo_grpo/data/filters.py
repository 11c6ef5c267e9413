"""Filters of rows. Every rule cites the passage of a paper that asks for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nemo_grpo.data.fields import Entry

Keep = Callable[[Entry], bool]


@dataclass(frozen=True)
class Filter:
    """A rule over entries, in their order.

    Attributes: rule, cited: what is kept and why, for the manifest.
                build: makes the test; called once per run, so that the test may keep state.
    """

    rule: str
    cited: str
    build: Callable[[], Keep]


def complete() -> Filter:
    """Question and answer are not empty; always the first filter."""

    def is_complete(entry: Entry) -> bool:
        return bool(entry.question.strip() and entry.answer.strip())

    return Filter("question and answer are not empty", "file format", lambda: is_complete)


def levels(wanted: Iterable[str], cited: str) -> Filter:
    """The metadata's ``level`` is one of these."""
    kept = frozenset(wanted)
    rule = f"level is one of {', '.join(sorted(kept))}"
    return Filter(rule, cited, lambda: lambda entry: str(entry.metadata.get("level")) in kept)


def short_solution(max_words: int, cited: str) -> Filter:
    """The metadata's ``solution`` has at most ``max_words`` words, as white space separates them."""

    def keep(entry: Entry) -> bool:
        return len(str(entry.metadata.get("solution", "")).split()) <= max_words

    return Filter(f"solution has at most {max_words} words", cited, lambda: keep)


def one_image(cited: str) -> Filter:
    """The entry has one image."""
    return Filter("one image", cited, lambda: lambda entry: len(entry.images) == 1)


def unique_questions(cited: str) -> Filter:
    """The first of several entries with the same question, white space aside, and the same images."""

    def build() -> Keep:
        seen: set[object] = set()

        def keep(entry: Entry) -> bool:
            key = (" ".join(entry.question.split()), repr(entry.images))
            new = key not in seen
            seen.add(key)
            return new

        return keep

    return Filter("first of equal questions", cited, build)


def first(count: int, cited: str) -> Filter:
    """The first ``count`` entries."""

    def build() -> Keep:
        left = iter(range(count))
        return lambda entry: next(left, None) is not None

    return Filter(f"first {count}", cited, build)
