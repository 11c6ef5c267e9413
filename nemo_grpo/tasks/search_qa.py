"""Questions that the policy answers by searching: search, read, search again, answer.

The form is Search-R1's (2503.09516), which TR-GRPO's agentic setting uses (2511.00066, appendix B.1.3):

    <search>query</search>  ->  <information>passages</information>  ->  ...  ->  <answer>...</answer>

The information tags and the text between them come from the environment and carry no loss.
"""

from __future__ import annotations

import random
import re
import string
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.base import ACCURACY, FORMAT, Episode, Observed, Problem
from nemo_grpo.tasks.jsonl import FileTask, FileTaskConfig
from nemo_grpo.tasks.response import last_answer
from nemo_grpo.tasks.retriever import Passage, Retriever
from nemo_grpo.tasks.search_facts import Facts
from nemo_grpo.tasks.special_tokens import broken_up

SEARCH_TAGS = ("<search>", "</search>", "<information>", "</information>")
_TAG = re.compile(r"<(/?)(think|search|information|answer)>")
_WELL_FORMED = re.compile(r"(?:think )?(?:search information (?:think )?)*answer ")
_INFORMATION = re.compile(r"(\s*<information>.*?</information>\s*)", re.DOTALL)

NO_PASSAGE = "No passage matches; try other words."
Call = tuple[Literal["search", "error"], str]
"""A turn's request: a search with its query, or an error with its message."""


class SearchQAConfig(FileTaskConfig):
    """Parameters of `SearchQA`. Without files the questions are about `Facts`.

    A problem of a file accepts its ``answer`` and, besides, every text of its ``metadata.answers``.
    """

    reward_components: ClassVar[Mapping[str, str]] = {
        "accuracy": ACCURACY,
        "answer": "1: the answer is correct; -1: it is wrong or missing",
        "format": FORMAT,
    }
    stop_texts: ClassVar[tuple[str, ...]] = ("</search>", "</answer>")

    name: Literal["search_qa"] = "search_qa"
    corpus: str | None = None
    """JSONL file of passages to search by BM25 in this process; null: the invented people."""
    retriever_url: str | None = Field(default=None, pattern="^https?://")
    """A service with Search-R1's POST /retrieve instead, such as `nemo-grpo retriever serve`."""
    retriever_timeout: float = Field(default=30.0, gt=0)
    """Timeout of one request to it, in seconds."""
    top_k: int = Field(default=3, ge=1, le=100)
    """Passages per search."""
    max_turns: int = Field(default=4, ge=1)
    """Turns of the policy in a response; a call in the last one ends the response."""
    max_query_chars: int = Field(default=256, ge=1, le=1024)
    """Longer queries are malformed."""
    max_information_chars: int = Field(default=2000, ge=16)
    """Maximum text of a search's result; the rest is cut off."""
    hops: tuple[Literal[1, 2], ...] = Field(default=(1, 2), min_length=1, strict=False)
    """Without files: number of facts that a question needs, drawn uniformly."""

    @property
    def num_turns(self) -> int:
        return self.max_turns

    def made_up(self, folder: Path, number: int) -> Self:
        """Ask about the invented people, and search in this process."""
        no_files = {"train_files": (), "validation_files": (), "corpus": None, "retriever_url": None}
        return self.model_copy(update=no_files)

    def build(self) -> SearchQA:
        return SearchQA(self)


class SearchQA:
    """Questions that the policy answers by searching, a `MultiTurnTask`.

    An answer is correct if it is one of `accepted_answers`, by SQuAD's exact match.
    """

    stop_texts: ClassVar[tuple[str, ...]] = SearchQAConfig.stop_texts
    tags: ClassVar[tuple[str, ...]] = SEARCH_TAGS

    def __init__(self, config: SearchQAConfig) -> None:
        self.config = config
        self._source: FileTask | Facts
        if not (config.train_files or config.validation_files):
            self._source = Facts(config.name, config.hops)
            return
        if config.corpus is None and config.retriever_url is None:
            raise UserError(
                "nemo_grpo.task: problems from files need passages to search; set corpus (a JSONL file) or "
                "retriever_url (a running `nemo-grpo retriever serve`)"
            )
        self._source = FileTask(config)
        _check_answers([*self._source.train, *self._source.validation])
        # Set only with files; without them the stream of problems has no end.
        self.num_train_problems = self._source.num_train_problems

    # Built at its first use, because checking a recipe builds the task but needs no index.
    @cached_property
    def retriever(self) -> Retriever:
        from nemo_grpo.tasks.retriever.bm25 import BM25Retriever

        if self.config.retriever_url is not None:
            from nemo_grpo.tasks.retriever.client import RetrieverClient

            return RetrieverClient(self.config.retriever_url, self.config.retriever_timeout)
        if self.config.corpus is not None:
            return BM25Retriever.of_file(self.config.corpus)
        assert isinstance(self._source, Facts)
        return BM25Retriever.in_memory(self._source.passages())

    def make_ready(self) -> None:
        assert self.retriever is not None

    def train_problem(self, index: int, seed: int) -> Problem:
        return self._source.train_problem(index, seed)

    def validation_problems(self, num_problems: int) -> list[Problem]:
        return self._source.validation_problems(num_problems)

    def demonstration(self, problem: Problem, rng: random.Random) -> str:
        """Write the searches that lead to the answer, each with the retriever's result, then the answer."""
        if isinstance(self._source, FileTask):
            return self._source.demonstration(problem, rng)
        queries = self._source.queries(problem)
        results = self.retriever.search(queries, self.config.top_k)
        calls = [
            f"<search>{query}</search>{self._render(passages)}"
            for query, passages in zip(queries, results, strict=True)
        ]
        return f"{''.join(calls)}<answer>{problem.answer}</answer>"

    # ------------------------------------------------------------------ the environment

    def observe(
        self, episodes: Sequence[Episode], turns: Sequence[str], reserved: Sequence[str] = ()
    ) -> list[Observed]:
        """Send all searches of these turns to the retriever together; see `MultiTurnTask.observe`."""
        calls: list[Call | None] = []
        for episode, turn in zip(episodes, turns, strict=True):
            # A call in the last turn is not carried out: no turn follows that could use its result.
            is_last_turn = episode.num_turns + 1 >= self.config.max_turns
            calls.append(None if is_last_turn else find_call(turn, self.config.max_query_chars))
        queries = [call[1] for call in calls if call is not None and call[0] == "search"]
        results = iter(self.retriever.search(queries, self.config.top_k) if queries else ())
        observed = []
        for episode, call in zip(episodes, calls, strict=True):
            after = replace(episode, num_turns=episode.num_turns + 1)
            if call is None:
                observed.append(Observed(after, None))
            elif call[0] == "search":
                after = replace(after, num_searches=after.num_searches + 1)
                observed.append(Observed(after, self._render(next(results), reserved)))
            else:
                after = replace(after, num_errors=after.num_errors + 1)
                observed.append(Observed(after, _information(f"Error: {call[1]}")))
        return observed

    def segments(self, response: str) -> list[tuple[str, bool]]:
        """Split at the information blocks, which the environment wrote; see `MultiTurnTask.segments`."""
        parts = _INFORMATION.split(response)
        return [(text, index % 2 == 0) for index, text in enumerate(parts) if text]

    def _render(self, passages: Sequence[Passage], reserved: Sequence[str] = ()) -> str:
        """Write the passages of a search, changed where they imitate tags, chat markers or special tokens."""
        lines = []
        for rank, passage in enumerate(passages, 1):
            title = f"{passage.title}: " if passage.title else ""
            lines.append(f"[{rank}] {title}{passage.text}")
        text = "\n".join(lines)[: self.config.max_information_chars]
        text = _TAG.sub(r"(\1\2)", text)
        text = text.replace("<|", "< |")
        text = broken_up(text, reserved)
        # Repeat this, because `broken_up` may write out a compatibility character, which may complete a tag.
        text = _TAG.sub(r"(\1\2)", text)
        return _information(text or NO_PASSAGE)

    # ------------------------------------------------------------------ the reward

    def extract(self, response: str) -> str | None:
        answer = last_answer(response)
        return None if answer is None else normalize_open_answer(answer)

    def score(self, problem: Problem, response: str) -> dict[str, float]:
        """Score a response; ``answer`` is TR-GRPO's Eq. 15: 1 for an exact match, otherwise -1."""
        is_right = matches_any(last_answer(response), accepted_answers(problem))
        return {
            "accuracy": float(is_right),
            "answer": 1.0 if is_right else -1.0,
            "format": search_format(response),
        }


def _check_answers(problems: Iterable[Problem]) -> None:
    for problem in problems:
        answers = problem.metadata.get("answers", [])
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise UserError(
                f"problem {problem.id!r}: metadata.answers={answers!r} must be a list of texts, "
                "which are accepted besides its answer"
            )


def find_call(turn: str, max_query_chars: int) -> Call | None:
    """Read a finished turn's request to the environment, or return None if the response is over.

    An answer ends the response, whatever else is in the turn. The time is linear in the text.
    """
    if "</answer>" in turn:
        return None
    end = turn.find("</search>")
    if end < 0:
        if "<search>" in turn:
            return "error", "the search was not closed."
        return None
    start = turn.rfind("<search>", 0, end)
    if start < 0:
        return "error", "the search was not opened."
    query = " ".join(turn[start + len("<search>") : end].split())
    if not query:
        return "error", "the query is empty."
    if len(query) > max_query_chars:
        return "error", f"the query has more than {max_query_chars} characters."
    return "search", query


def search_format(response: str) -> float:
    """Return 1 if the response consists of think, search, information and answer blocks in a valid order.

    Every search is directly followed by its information. At most one think block comes before a search or the
    answer. One answer ends the response.
    """
    block_names: list[str] = []
    is_inside_block = False
    end_of_tag = 0
    for tag in _TAG.finditer(response):
        is_closing = bool(tag[1])
        name = tag[2]
        if is_closing != is_inside_block:  # a block in a block, or an end without a beginning
            return 0.0
        if is_closing:
            if name != block_names[-1]:
                return 0.0
        else:
            if response[end_of_tag : tag.start()].strip():  # text between two blocks
                return 0.0
            block_names.append(name)
        is_inside_block = not is_closing
        end_of_tag = tag.end()
    if is_inside_block or response[end_of_tag:].strip():
        return 0.0
    # The order is checked on the names alone, so that no pattern runs over the texts inside.
    order = "".join(f"{name} " for name in block_names)
    return float(_WELL_FORMED.fullmatch(order) is not None)


def accepted_answers(problem: Problem) -> list[str]:
    """List the problem's answer and the further ones of its metadata."""
    return [problem.answer, *problem.metadata.get("answers", [])]


def _information(text: str) -> str:
    return f"\n<information>{text}</information>\n"


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_open_answer(answer: str) -> str:
    """Normalise: lower case, without ASCII punctuation and the articles a, an, the; single spaces.

    The order of steps is that of SQuAD's evaluation (1606.05250): case, punctuation, articles, spaces.
    There are two deviations. Decomposed letters are composed, and a step that would leave nothing of an
    answer such as ``A`` or ``+`` is skipped.
    """
    lowered = unicodedata.normalize("NFC", answer).lower()
    without_punctuation = lowered.translate(_NO_PUNCTUATION)
    without_articles = _ARTICLES.sub(" ", without_punctuation)
    for form in (without_articles, without_punctuation, lowered):
        single_spaced = " ".join(form.split())
        if single_spaced:
            return single_spaced
    return ""


def matches_any(answer: str | None, accepted: Iterable[str]) -> bool:
    """Return True if the normalised answer is one of the accepted ones; an empty answer matches nothing."""
    normalized = normalize_open_answer(answer or "")
    if not normalized:
        return False
    return any(normalized == normalize_open_answer(gold) for gold in accepted)
