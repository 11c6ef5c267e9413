"""A retriever behind HTTP: a limited number of tries, then an error with the remedy."""

import http.client
import json
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nemo_grpo.tasks.retriever.base import TOKEN, Passage, RetrieverError

log = logging.getLogger(__name__)

QUERIES_PER_REQUEST = 64
FIRST_WAIT = 0.5
"""Seconds before the second try; doubled before each later one."""


class RetrieverClient:
    """A `Retriever` backed by a service.

    Failures that may be transient (no connection, a timeout, 5xx, a broken answer) are retried; refused
    requests (4xx) are not. Proxies of the environment are not used; its `TOKEN` is.

    Args: url: of the service, such as http://127.0.0.1:8765.  timeout: seconds for one try.
          num_tries: all tries of one request, at least 1.
    """

    def __init__(self, url: str, *, timeout: float = 30.0, num_tries: int = 6) -> None:
        assert num_tries >= 1, num_tries
        self.url, self.timeout, self.num_tries = url.rstrip("/"), timeout, num_tries
        token = os.environ.get(TOKEN)
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """See `Retriever.search`."""
        found: list[list[Passage]] = []
        for start in range(0, len(queries), QUERIES_PER_REQUEST):
            part = [_encodable(query) for query in queries[start : start + QUERIES_PER_REQUEST]]
            found += self._request("/search", {"queries": part, "top_k": top_k}, partial(_passages, part))
        return found

    def health(self) -> dict[str, Any]:
        """What the service says about itself: ``status``, ``index``, ``num_passages``."""
        return self._request("/health", None, dict)

    def _request(self, path: str, body: dict[str, Any] | None, read: Callable[[Any], Any]) -> Any:
        wait = FIRST_WAIT
        for number in range(1, self.num_tries + 1):
            try:
                return read(self._once(path, body))
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {_said(error)}"
                if error.code < 500:
                    raise RetrieverError(f"the retriever at {self.url} refused {path}: {reason}") from error
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
            if number < self.num_tries:
                log.warning("retriever %s: %s; try %d of %d", self.url, reason, number + 1, self.num_tries)
                time.sleep(wait)
                wait *= 2
        raise RetrieverError(
            f"the retriever at {self.url} gave no answer in {self.num_tries} tries ({reason}); is "
            "`nemo-grpo retriever serve` running there, and reachable from this machine?"
        )

    def _once(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=self._headers)
        with self._opener.open(request, timeout=self.timeout) as response:
            return json.load(response)


def _passages(queries: list[str], answer: Any) -> list[list[Passage]]:
    results = [[Passage(**passage) for passage in passages] for passages in answer["results"]]
    if len(results) != len(queries):
        raise ValueError(f"{len(results)} results for {len(queries)} queries")
    return results


def _encodable(query: str) -> str:
    """The query without halves of characters, which JSON cannot carry."""
    return query.encode(errors="replace").decode()


def _said(error: urllib.error.HTTPError) -> str:
    """The service's own words, if it has any."""
    try:
        return str(json.load(error)["error"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return str(error.reason)
