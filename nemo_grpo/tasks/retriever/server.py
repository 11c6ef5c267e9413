"""The retriever as a service: JSON over HTTP, by starlette and uvicorn.

    POST /search  {"queries": ["..."], "top_k": 3} ->  {"results": [[{"id", "title", "text", "score"}, ...]]}
    GET  /health                                   ->  {"status": "ok", "index": "bm25", "num_passages": 2000}

Whatever is wrong with a request comes back as {"error": "..."} with status 4xx and harms no other request.
There is no authentication: it listens on this machine only unless it is told otherwise.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any

import anyio
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from nemo_grpo.errors import UserError
from nemo_grpo.tasks.retriever.base import Retriever

MAX_BODY_BYTES = 1 << 20
MAX_DRAINED_BYTES = 16 << 20
MAX_QUERIES = 256
MAX_QUERY_CHARS = 4096
MAX_TOP_K = 100
MAX_CONNECTIONS = 512
IDLE_SECONDS = 60.0
"""A connection on which nothing comes for so long is closed."""


class SearchRequest(BaseModel):
    """The body of POST /search."""

    model_config = ConfigDict(extra="forbid", strict=True)

    queries: list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]] = Field(
        min_length=1, max_length=MAX_QUERIES
    )
    top_k: int | None = Field(default=None, ge=1, le=MAX_TOP_K)


class _Protocol(H11Protocol):
    """uvicorn's protocol, which limits neither open connections nor the wait for the end of a head."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()  # the client tries again

    def data_received(self, data: bytes) -> None:
        self._waiting.cancel()
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.cancel()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._waiting = self.loop.call_later(IDLE_SECONDS, self.transport.close)


class RetrieverServer(uvicorn.Server):
    """As many searches at once as there are cores; `run` serves until `stop`.

    Args:   about: what /health tells beside the status.  top_k: for requests that do not say.
    Raises: UserError: the address cannot be used.
    """

    def __init__(
        self, address: tuple[str, int], retriever: Retriever, *, top_k: int, about: dict[str, Any]
    ) -> None:
        self.retriever, self.top_k, self.about = retriever, top_k, about
        self._cores = anyio.CapacityLimiter(os.cpu_count() or 1)
        try:
            self._socket = socket.create_server(address, backlog=256)
        except OSError as error:
            host, port = address
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror}; choose another") from error
        self.server_address = self._socket.getsockname()
        routes = [Route("/search", self._search, methods=["POST"]), Route("/health", self._health)]
        handlers: Any = {HTTPException: _refuse, ClientDisconnect: _refuse, 500: _refuse}
        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers=handlers),
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=int(IDLE_SECONDS),
        )
        super().__init__(config)

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.server_address)

    def serve_forever(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`, then finish what is under way."""
        self.run([self._socket])

    def stop(self) -> None:
        """Take no more requests; `serve_forever` returns when those under way are answered."""
        self.should_exit = True

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", **self.about})

    async def _search(self, request: Request) -> JSONResponse:
        body = await _body(request)
        try:
            asked = SearchRequest.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"{where or 'body'}: {first['msg']}") from error
        found = await anyio.to_thread.run_sync(
            self.retriever.search, asked.queries, asked.top_k or self.top_k, limiter=self._cores
        )
        return JSONResponse({"results": [[asdict(passage) for passage in passages] for passages in found]})


async def _body(request: Request) -> bytes:
    """The body; a larger one is read on, up to a limit, so that a client that still sends sees the answer."""
    body, num_bytes, parts = bytearray(), 0, request.stream()
    try:
        while part := await asyncio.wait_for(anext(parts), IDLE_SECONDS):
            num_bytes += len(part)
            if num_bytes <= MAX_BODY_BYTES:
                body += part
            elif num_bytes > MAX_DRAINED_BYTES:
                break
    except TimeoutError as error:
        message = f"no more came for {IDLE_SECONDS:g} s"
        raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, message, {"Connection": "close"}) from error
    if num_bytes > MAX_BODY_BYTES:
        message = f"at most {MAX_BODY_BYTES} bytes are taken: send fewer queries"
        raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, {"Connection": "close"})
    return bytes(body)


def _refuse(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    return JSONResponse({"error": "internal error; see the log"}, HTTPStatus.INTERNAL_SERVER_ERROR)


def serve(server: RetrieverServer, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then finish what is under way."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)  # uvicorn raises the signal again when it has ended
    on_ready(server.url)
    server.serve_forever()
