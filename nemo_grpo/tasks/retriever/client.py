"""Client of a retriever service by Search-R1's protocol, with retries."""

import http.client
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.retriever import Passage, RetrieverError
from nemo_grpo.tasks.retriever.corpus import passage_of

log = logging.getLogger(__name__)

PATH = "/retrieve"
QUERIES_PER_REQUEST = 64
NUM_TRIES = 6
"""Maximum number of tries of one request."""
FIRST_WAIT = 0.5
"""Seconds before the second try; doubled before each later one."""
TRANSIENT = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError, UserError)
"""Errors of a connection or an answer that another try may not meet."""


class RetrieverClient:
    """A `Retriever` backed by a service.

    Failures that may be transient (no connection, a timeout, 5xx, a broken answer) are retried; refused
    requests (4xx) are not. Proxies of the environment are not used.

    Args:
        url: address of the service, with or without `PATH`.
        timeout: seconds for one try.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url.rstrip("/").removesuffix(PATH)
        self.timeout = timeout
        # Clusters often set a proxy for the internet, which cannot reach the cluster's own machines.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        results: list[list[Passage]] = []
        for start in range(0, len(queries), QUERIES_PER_REQUEST):
            part = queries[start : start + QUERIES_PER_REQUEST]
            # A policy may write half of a character, which JSON cannot carry.
            encodable = [query.encode(errors="replace").decode() for query in part]
            results += self._request(encodable, top_k)
        return results

    def _request(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        """Send one request, again after failures that may be transient."""
        body = json.dumps({"queries": queries, "topk": top_k, "return_scores": True}).encode()
        wait = FIRST_WAIT
        for number in range(1, NUM_TRIES + 1):
            try:
                return _passages(queries, self._once(body))
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {_detail(error)}"
                if error.code < 500:
                    raise RetrieverError(f"the retriever at {self.url} refused {PATH}: {reason}") from error
            except TRANSIENT as error:
                reason = f"{type(error).__name__}: {error}"
            if number < NUM_TRIES:
                log.warning("retriever %s: %s; try %d of %d", self.url, reason, number + 1, NUM_TRIES)
                time.sleep(wait)
                wait *= 2
        raise RetrieverError(
            f"the retriever at {self.url} gave no answer in {NUM_TRIES} tries ({reason}); is "
            f"`nemo-grpo retriever serve`, or another service with Search-R1's {PATH}, running there?"
        )

    def _once(self, body: bytes) -> Any:
        request = urllib.request.Request(self.url + PATH, body, {"Content-Type": "application/json"})
        with self._opener.open(request, timeout=self.timeout) as response:
            return json.load(response)


def _passages(queries: list[str], answer: Any) -> list[list[Passage]]:
    results = []
    for items in answer["result"]:
        results.append([_passage(item, index) for index, item in enumerate(items)])
    if len(results) != len(queries):
        raise ValueError(f"{len(results)} results for {len(queries)} queries")
    return results


def _passage(item: Mapping[str, Any], index: int) -> Passage:
    # A server that ignores return_scores sends the document itself as the item.
    document = item.get("document", item)
    passage = passage_of(document, index, "the retriever's answer")
    return replace(passage, score=float(item.get("score", 0.0)))


def _detail(error: urllib.error.HTTPError) -> str:
    """Return the detail that FastAPI and our own service add to an error, or else its standard reason."""
    try:
        return str(json.load(error)["detail"])
    except TRANSIENT:
        return str(error.reason)
