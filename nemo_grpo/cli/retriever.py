"""``nemo-grpo retriever``: the search service for tasks with search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from nemo_grpo.support.errors import UserError

app = typer.Typer(name="retriever", no_args_is_help=True, help="Serve passages to tasks that search.")
# With this callback the command keeps its name. Typer would turn a group with a single command into that
# command.
app.callback()(lambda: None)


@app.command()
def serve(
    corpus: Annotated[Path, Option(help="JSONL file of passages with the keys id, title and text.")],
    cache: Annotated[
        Path | None, Option(help="Folder that keeps the index. The default is CORPUS.bm25.")
    ] = None,
    host: Annotated[
        str, Option(help="Address to listen on. 0.0.0.0 admits every machine that reaches this one.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on. 0 chooses a free one.")] = 8765,
    top_k: Annotated[
        int, Option(min=1, max=100, help="Number of passages for a request that does not name it.")
    ] = 3,
) -> None:
    """Answer Search-R1's POST /retrieve until Ctrl-C, from a BM25 index of the corpus.

    The first call builds the index; later calls read it from --cache.

    Example: nemo-grpo retriever serve --corpus wiki.jsonl --port 8765
    """
    try:
        from nemo_grpo.tasks.retriever import server
        from nemo_grpo.tasks.retriever.bm25 import BM25Retriever
    except ImportError as error:
        raise UserError("the service needs starlette and uvicorn; pip install 'nemo-grpo[search]'") from error
    retriever = BM25Retriever.of_file(corpus, cache)
    service = server.application(retriever, top_k)
    server.serve(service, host, port, lambda url: typer.echo(f"{len(retriever.passages)} passages at {url}"))
