"""Dense retrieval: the passages whose vectors are nearest to the query's, by an encoder and FAISS."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nemo_grpo.support.errors import UserError, first_line
from nemo_grpo.tasks.retriever import Passage
from nemo_grpo.tasks.retriever.corpus import Corpus, index_folder, indexed_text

if TYPE_CHECKING:
    import numpy as np

INDEX = "index.faiss"
PASSAGES_PER_CALL = 256
MAX_TRAINING_PASSAGES = 200_000
"""Most passages, spread over the corpus, from which an index learns its cells."""


class E5Encoder:
    """E5 (2212.03533): mean of the last layer's states, prefixes ``query: `` and ``passage: ``.

    Args:   folder: a Hugging Face encoder with its tokenizer.  device: as torch names it.
    """

    MAX_TOKENS = 512

    def __init__(self, folder: str | Path, device: str = "cpu") -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.name, self._torch, self.device = str(Path(folder).resolve()), torch, device
        if not (Path(folder) / "config.json").is_file():
            raise UserError(
                f"encoder {folder} is not a Hugging Face folder (no config.json); give one that is"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model: Any = AutoModel.from_pretrained(folder, local_files_only=True).eval().to(device)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"cannot load the encoder {folder}: {first_line(error)}") from error
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str], *, queries: bool) -> np.ndarray:
        """Turn texts into vectors of length 1: [N, D] float32."""
        prefix = "query: " if queries else "passage: "
        inputs = self._tokenizer(
            [prefix + text for text in texts],
            padding=True,
            truncation=True,
            max_length=self.MAX_TOKENS,
            return_tensors="pt",
        ).to(self.device)
        with self._lock, self._torch.inference_mode():
            states = self._model(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"][:, :, None]
        mean = (states * mask).sum(1) / mask.sum(1)
        return self._torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()


class DenseRetriever:
    """Largest inner product of unit vectors, by FAISS."""

    def __init__(self, passages: Sequence[Passage], encoder: E5Encoder, index: Any) -> None:
        self.passages, self._encoder, self._index = passages, encoder, index

    @classmethod
    def of_file(
        cls, path: str | Path, encoder: E5Encoder, cache: str | Path | None = None, *, factory: str = "Flat"
    ) -> DenseRetriever:
        """Index a JSONL file: read the index from ``cache``, or build it there if anything has changed.

        Args:   cache: folder; None: the corpus's path with ``.dense`` appended.
                factory: FAISS's description of an index, such as Flat or IVF4096,SQ8.
        """
        faiss, corpus = _faiss(), Corpus(path)
        key = {"kind": "dense", "encoder": encoder.name, "factory": factory, **corpus.fingerprint}
        folder = Path(cache) if cache is not None else Path(f"{path}.dense")
        built = index_folder(
            folder, key, lambda to: faiss.write_index(_build(corpus, encoder, factory), str(to / INDEX))
        )
        return cls(corpus, encoder, faiss.read_index(str(built / INDEX)))

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        if not queries:
            return []
        vectors = self._encoder.encode(queries, queries=True)
        scores, numbers = self._index.search(vectors, min(top_k, len(self.passages)))
        return [
            [replace(self.passages[int(i)], score=float(s)) for s, i in zip(*row, strict=True) if i >= 0]
            for row in zip(scores, numbers, strict=True)
        ]


def _build(corpus: Corpus, encoder: E5Encoder, factory: str) -> Any:
    import numpy as np

    faiss = _faiss()
    width = encoder.encode([indexed_text(corpus[0])], queries=False).shape[1]
    try:
        index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise UserError(f"FAISS cannot make the index {factory!r}; see its index factory strings") from error
    if not index.is_trained:
        step = -(-len(corpus) // MAX_TRAINING_PASSAGES)
        index.train(np.concatenate([*_vectors(corpus[::step], encoder)]))
    for vectors in _vectors(corpus, encoder):
        index.add(vectors)
    return index


def _vectors(passages: Sequence[Passage], encoder: E5Encoder) -> Iterator[np.ndarray]:
    for start in range(0, len(passages), PASSAGES_PER_CALL):
        part = passages[start : start + PASSAGES_PER_CALL]
        yield encoder.encode([*map(indexed_text, part)], queries=False)


def _faiss() -> ModuleType:
    try:
        import faiss
    except ImportError as error:
        raise UserError("dense retrieval needs FAISS; pip install 'nemo-grpo[dense]'") from error
    return faiss
