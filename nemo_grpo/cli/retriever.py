"""``nemo-grpo retriever``: the search service for tasks with search."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from nemo_grpo.support.errors import UserError

if TYPE_CHECKING:
    from nemo_grpo.tasks.retriever import Retriever

app = typer.Typer(name="retriever", no_args_is_help=True, help="Serve passages to tasks that search.")
app.callback()(lambda: None)  # a group, so that its only command has a name


@app.command()
def serve(
    corpus: Annotated[Path, Option(help="JSONL file of passages: id, title, text.")],
    index: Annotated[Literal["bm25", "dense"], Option(help="By words, or by vectors and FAISS.")] = "bm25",
    encoder: Annotated[Path | None, Option(help="Folder of the E5 encoder; with --index dense.")] = None,
    faiss: Annotated[str, Option(help="FAISS index factory string; with --index dense.")] = "Flat",
    device: Annotated[str, Option(help="Device of the encoder: cpu, cuda, cuda:1.")] = "cpu",
    cache: Annotated[Path | None, Option(help="Of the index; else CORPUS.bm25 or CORPUS.dense.")] = None,
    host: Annotated[str, Option(help="0.0.0.0 admits every machine that reaches this one.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0: a free one.")] = 8765,
    top_k: Annotated[int, Option(min=1, max=100, help="Passages, if a request does not say.")] = 3,
) -> None:
    """Build the index, or read it from its folder, and answer Search-R1's POST /retrieve until Ctrl-C.

    Example: nemo-grpo retriever serve --corpus wiki.jsonl --port 8765
    """
    try:
        from nemo_grpo.tasks.retriever import server
    except ImportError as error:
        raise UserError("the service needs starlette and uvicorn; pip install 'nemo-grpo[search]'") from error
    retriever, num_passages = _build(corpus, index, encoder, faiss, device, cache)
    service = server.application(retriever, top_k)
    server.serve(service, host, port, lambda url: typer.echo(f"{num_passages} passages at {url}"))


def _build(
    corpus: Path, index: str, encoder: Path | None, faiss: str, device: str, cache: Path | None
) -> tuple[Retriever, int]:
    if index == "bm25":
        from nemo_grpo.tasks.retriever.bm25 import BM25Retriever

        if encoder is not None:
            raise UserError("--encoder needs --index dense; add that, or leave --encoder out")
        words = BM25Retriever.of_file(corpus, cache)
        return words, len(words.passages)
    from nemo_grpo.tasks.retriever.dense import DenseRetriever, E5Encoder

    if encoder is None:
        raise UserError("--index dense needs --encoder: a Hugging Face folder, such as that of e5-base-v2")
    vectors = DenseRetriever.of_file(corpus, E5Encoder(encoder, device), cache, factory=faiss)
    return vectors, len(vectors.passages)
