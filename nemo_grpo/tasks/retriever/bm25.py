"""BM25 over a corpus, by bm25s; the index is built once and kept on the disk."""

import logging
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final, Self

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.retriever import Passage
from nemo_grpo.tasks.retriever.corpus import Corpus, index_folder, indexed_text

STOPWORDS = "en"
_FORM: Final = "NFC"


class BM25Retriever:
    """Lucene's BM25 (k1 = 1.5, b = 0.75), English stop words left out, no stemming.

    Equal scores keep the corpus's order, so that answers are the same on every machine. A passage that shares
    no word with the query is never returned.
    """

    def __init__(self, passages: Sequence[Passage], index: Any) -> None:
        self.passages = passages
        self._index = index

    @classmethod
    def in_memory(cls, passages: Sequence[Passage]) -> Self:
        """Index passages in memory; nothing is written."""
        return cls(passages, _build(passages))

    @classmethod
    def of_file(cls, path: str | Path, cache: str | Path | None = None) -> Self:
        """Index a JSONL file: read the index from ``cache``, or build it there if the file has changed.

        Args:
            path: path of the corpus.
            cache: folder of the index; None: the corpus's path with ``.bm25`` appended.
        """
        bm25s = _bm25s()
        corpus = Corpus(path)
        key = {"kind": "bm25", "bm25s": bm25s.__version__, "stopwords": STOPWORDS, "form": _FORM}
        key |= corpus.fingerprint
        folder = Path(cache) if cache is not None else Path(f"{path}.bm25")

        def build(target: Path) -> None:
            _build(corpus).save(target, show_progress=False)

        index_folder(folder, key, build)
        # Map the index into memory, so that all processes of a machine share one copy.
        return cls(corpus, bm25s.BM25.load(folder, mmap=True, show_progress=False))

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [self._search(query, top_k) for query in queries]

    def _search(self, query: str, top_k: int) -> list[Passage]:
        import numpy as np

        (words,) = _words([query], as_ids=False)
        ids = self._index.get_tokens_ids(words)
        if not ids:
            return []
        scores = self._index.get_scores_from_ids(ids)
        top_k = min(top_k, len(scores))
        # bm25s's own top-k promises no order of equal scores. Here all passages that tie with the last one
        # are candidates, and a stable sort keeps the corpus's order among them.
        lowest_score = np.partition(scores, -top_k)[-top_k]
        candidates = np.flatnonzero((scores >= lowest_score) & (scores > 0))
        best_first = np.argsort(-scores[candidates], kind="stable")[:top_k]
        return [
            replace(self.passages[int(index)], score=float(scores[index])) for index in candidates[best_first]
        ]


def _build(passages: Iterable[Passage]) -> Any:
    index = _bm25s().BM25()
    words = _words(map(indexed_text, passages), as_ids=True)
    if not words.vocab:
        raise UserError(
            "the corpus has no word that BM25 could find: its passages hold only English stop words and "
            "single characters; give a corpus of texts"
        )
    index.index(words, show_progress=False)
    return index


def _words(texts: Iterable[str], *, as_ids: bool) -> Any:
    # A letter with an accent has two encodings, with which bm25s would see two different words.
    composed = (unicodedata.normalize(_FORM, text) for text in texts)
    return _bm25s().tokenize(composed, stopwords=STOPWORDS, return_ids=as_ids, show_progress=False)


def _bm25s() -> ModuleType:
    try:
        import bm25s
    except ImportError as error:
        raise UserError("BM25 needs the package bm25s; pip install 'nemo-grpo[search]'") from error
    # Importing bm25s sets its logger to DEBUG.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s
