"""The retriever as a service that speaks Search-R1's protocol: JSON over HTTP, by starlette and uvicorn.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
    ->  {"result": [[{"document": {"id", "title", "text", "contents"}, "score": 9.5}, ...], ...]}

Without ``return_scores`` the lists contain the documents themselves. ``contents`` is the title, a line break
and the text. The service has no authentication.
"""

import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.retriever import Passage, Retriever
from nemo_grpo.tasks.retriever.corpus import indexed_text


class RetrieveRequest(BaseModel):
    """The body of POST /retrieve; other keys are ignored."""

    queries: list[str]
    topk: int | None = Field(default=None, ge=0)
    return_scores: bool = False


def application(retriever: Retriever, top_k: int) -> Starlette:
    """Make the service of a retriever.

    Args:
        retriever: answers the queries.
        top_k: passages per query if a request gives no ``topk``.
    """

    async def retrieve(request: Request) -> JSONResponse:
        try:
            body = RetrieveRequest.model_validate_json(await request.body())
        except ValidationError as error:
            # Leave out the input, because a body that is not UTF-8 has no JSON form.
            return JSONResponse({"detail": error.errors(include_url=False, include_input=False)}, 422)
        # Search in a thread, so that other requests do not wait for it.
        results = await run_in_threadpool(retriever.search, body.queries, body.topk or top_k)
        answers = []
        for passages in results:
            answers.append([_answer(passage, body.return_scores) for passage in passages])
        return JSONResponse({"result": answers})

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


def _answer(passage: Passage, with_score: bool) -> dict[str, Any]:
    document = {"id": passage.id, "title": passage.title, "text": passage.text}
    document["contents"] = indexed_text(passage)
    if with_score:
        return {"document": document, "score": passage.score}
    return document


def serve(service: Starlette, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests that have arrived.

    Args:
        service: the service that `application` made.
        host: address to listen on.
        port: 0 for a free one.
        on_ready: gets the service's address once it listens.
    """
    try:
        listening = socket.create_server((host, port), backlog=256)
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another") from error
    server = uvicorn.Server(uvicorn.Config(service, lifespan="off", log_level="warning"))
    # uvicorn raises the signal again when it has ended. The default handlers would then end this process with
    # the signal's status instead of 0.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    on_ready("http://{}:{}".format(*listening.getsockname()))
    server.run([listening])
