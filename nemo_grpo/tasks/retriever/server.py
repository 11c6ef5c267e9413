"""The retriever as a service: JSON over HTTP, by starlette and uvicorn.

    POST /search  {"queries": ["..."], "top_k": 3} ->  {"results": [[{"id", "title", "text", "score"}, ...]]}
    GET  /health                                   ->  {"status": "ok", "index": "bm25", "num_passages": 2000}

Whatever is wrong with a request comes back as {"error": "..."} with status 4xx and harms no other request.
With a token, /search asks for it; without one, the service listens on this machine only.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
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
from nemo_grpo.tasks.retriever.base import TOKEN, Retriever

MAX_BODY_BYTES = 1 << 20
MAX_DRAINED_BYTES = 16 << 20
MAX_QUERIES = 256
MAX_QUERY_CHARS = 4096
MAX_TOP_K = 100
MAX_CONNECTIONS = 512
MAX_CONNECTIONS_PER_CLIENT = 64
"""Of one address."""
REQUEST_SECONDS = 60.0
"""Within this time a whole request must come, and what is sent must be read."""


class SearchRequest(BaseModel):
    """The body of POST /search."""

    model_config = ConfigDict(extra="forbid", strict=True)

    queries: list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]] = Field(
        min_length=1, max_length=MAX_QUERIES
    )
    top_k: int | None = Field(default=None, ge=1, le=MAX_TOP_K)


class _Protocol(H11Protocol):
    """uvicorn's protocol, which limits neither open connections nor the time for a request to come.

    A connection too many displaces the one that has waited longest for the end of a request, so a client that
    sends a request at once is served, however many others send theirs byte by byte.
    """

    _deadline: asyncio.TimerHandle | None = None
    """None while a whole request is being answered."""
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_request()
        same_host = [each for each in self._open() if each.host == self.host]
        _make_room(same_host, MAX_CONNECTIONS_PER_CLIENT)
        _make_room(self._open(), MAX_CONNECTIONS)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_whole():
            self._cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins with the next request if it has come already
        if not self._is_whole():
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    @property
    def host(self) -> str:
        """The client's address."""
        return self.client[0] if self.client else ""

    def _open(self) -> list[_Protocol]:
        return [each for each in self.connections if not each.transport.is_closing()]  # type: ignore[misc]

    def _is_whole(self) -> bool:
        """Whether a request has come to its end and is not answered yet."""
        return self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete)

    def _await_request(self) -> None:
        self._cancel()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        body = json.dumps({"error": f"no whole request came within {REQUEST_SECONDS:g} s"})
        head = f"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: {len(body)}"
        self.transport.write(f"{head}\r\nContent-Type: application/json\r\n\r\n{body}".encode())
        self.transport.close()


def _make_room(connections: list[_Protocol], limit: int) -> None:
    """Close the one that waits longest for its request; the newest has none yet."""
    if len(connections) > limit:
        deadlines = {each: each._deadline.when() for each in connections if each._deadline is not None}
        min(deadlines, key=deadlines.__getitem__).transport.abort()


class RetrieverServer(uvicorn.Server):
    """As many searches at once as there are cores; `run` serves until `stop`.

    Args:   about: what /health tells beside the status.  top_k: for requests that do not say.
            token: without it /search answers nobody; None: it answers everybody on this machine.
    Raises: UserError: the address cannot be used, or other machines reach it and there is no token.
    """

    def __init__(
        self,
        address: tuple[str, int],
        retriever: Retriever,
        *,
        top_k: int,
        about: dict[str, Any],
        token: str | None = None,
    ) -> None:
        if not token and not _is_local(address[0]):
            raise UserError(
                f"--host {address[0]} admits other machines: export {TOKEN}=$(openssl rand -hex 32) for the "
                "service and for the runs that ask it, or leave --host out"
            )
        self.retriever, self.top_k, self.about, self.token = retriever, top_k, about, token
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
            timeout_keep_alive=int(REQUEST_SECONDS),
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
        if self.token and not _bears(request, self.token):
            message = f"the service asks for its token; set {TOKEN} as where it was started"
            raise HTTPException(HTTPStatus.UNAUTHORIZED, message, {"Connection": "close"})
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
    body, num_bytes = bytearray(), 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= MAX_BODY_BYTES:
            body += part
        elif num_bytes > MAX_DRAINED_BYTES:
            break
    if num_bytes > MAX_BODY_BYTES:
        message = f"at most {MAX_BODY_BYTES} bytes are taken: send fewer queries"
        raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, {"Connection": "close"})
    return bytes(body)


def _bears(request: Request, token: str) -> bool:
    given = request.headers.get("Authorization", "")
    return hmac.compare_digest(given.encode(), f"Bearer {token}".encode())


def _is_local(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
