"""Filters of rows. Every rule cites the passage of a paper that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from nemo_grpo.data.fields import Entry

Keep = Callable[[Entry], bool]


@dataclass(frozen=True)
class Options:
    """Inputs that a filter may need.

    Attributes:
        count_tokens: length of a text in tokens; None where no filter needs it.
        excluded: questions of the data sets that `Source.excludes` names, as `same_question` writes them.
    """

    count_tokens: Callable[[str], int] | None = None
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Filter:
    """A rule over entries, in their order.

    Attributes:
        rule: what is kept, in words; part of the manifest.
        cited: paper and passage, or another reason.
        build: makes the test; called once per run, so that the test may keep state.
        needs_tokens: needs `Options.count_tokens`.
    """

    rule: str
    cited: str
    build: Callable[[Options], Keep]
    needs_tokens: bool = False


def same_question(question: str) -> str:
    """Questions that differ in white space only are the same."""
    return " ".join(question.split())


def complete() -> Filter:
    """Question and answer are not empty; always the first filter."""
    return Filter("question and answer are not empty", "file format", lambda _: _is_complete)


def _is_complete(entry: Entry) -> bool:
    return bool(entry.question.strip() and entry.answer.strip())


def levels(wanted: Iterable[str], cited: str) -> Filter:
    """The metadata's ``level`` is one of these."""
    kept = frozenset(wanted)
    rule = f"level is one of {', '.join(sorted(kept))}"
    return Filter(rule, cited, lambda _: lambda entry: str(entry.metadata.get("level")) in kept)


def short_solution(max_tokens: int, cited: str) -> Filter:
    """The metadata's ``solution`` has at most ``max_tokens`` tokens."""

    def build(options: Options) -> Keep:
        count = options.count_tokens
        assert count is not None
        return lambda entry: count(str(entry.metadata.get("solution", ""))) <= max_tokens

    return Filter(f"solution has at most {max_tokens} tokens", cited, build, needs_tokens=True)


def unique_questions(cited: str) -> Filter:
    """The first of several entries with the same question and the same images."""

    def build(_: Options) -> Keep:
        seen: set[object] = set()

        def keep(entry: Entry) -> bool:
            key = (same_question(entry.question), repr(entry.images))
            new = key not in seen
            seen.add(key)
            return new

        return keep

    return Filter("first of equal questions", cited, build)


def not_in(names: Iterable[str], cited: str) -> Filter:
    """The question is in none of the data sets of these names; see `Options.excluded`."""
    rule = f"question is not in {', '.join(names)}"
    return Filter(rule, cited, lambda options: lambda e: same_question(e.question) not in options.excluded)


def first(count: int, cited: str) -> Filter:
    """The first ``count`` entries."""

    def build(_: Options) -> Keep:
        left = iter(range(count))
        return lambda entry: next(left, None) is not None

    return Filter(f"first {count}", cited, build)
