"""The service over real sockets: good queries, bad ones, many at once, and its end."""

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_grpo.cli import retriever as retriever_command
from nemo_grpo.errors import UserError
from nemo_grpo.tasks import parse_task
from nemo_grpo.tasks.environment import Episode
from nemo_grpo.tasks.retriever import Passage, RetrieverError, client, server
from nemo_grpo.tasks.retriever.bm25 import BM25Retriever
from nemo_grpo.tasks.retriever.client import RetrieverClient
from nemo_grpo.tasks.retriever.server import RetrieverServer

PASSAGES = [Passage(f"p{i}", f"Town {i}", f"Town {i} has word{i} and züge") for i in range(50)]


class Breaking:
    """Fails for one query, waits for another."""

    def __init__(self, inner):
        self.inner, self.arrived, self.go_on = inner, threading.Event(), threading.Event()

    def search(self, queries, top_k):
        if "break" in queries:
            raise RuntimeError("boom")
        if "wait" in queries:
            self.arrived.set()
            assert self.go_on.wait(20)
        return self.inner.search(queries, top_k)


@pytest.fixture
def retriever():
    return Breaking(BM25Retriever.in_memory(PASSAGES))


@pytest.fixture
def service(retriever):
    about = {"index": "bm25", "num_passages": len(PASSAGES)}
    running = RetrieverServer(("127.0.0.1", 0), retriever, top_k=3, about=about)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield running
    retriever.go_on.set()
    running.stop()
    thread.join(10)
    assert not thread.is_alive()


def post(service, body, path="/search", headers=None):
    connection = http.client.HTTPConnection(*service.server_address, timeout=20)
    connection.request("POST", path, body, headers or {})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer


def raw(service, data):
    with socket.create_connection(service.server_address, timeout=20) as connection:
        connection.sendall(data)
        return connection.makefile("rb").read()


def test_passages_come_back_as_they_are(service, retriever):
    queries = ["word7", "nothing", "züge word3"]
    found = RetrieverClient(service.url).search(queries, 2)
    assert found == retriever.search(queries, 2)
    assert found[0] == [PASSAGES[7].__class__(**{**PASSAGES[7].__dict__, "score": found[0][0].score})]
    assert found[1] == []
    assert [p.id for p in found[2]] == ["p3", "p0"]
    assert RetrieverClient(service.url + "/").search([], 2) == []
    assert RetrieverClient(service.url).search(["\ud800 word7"], 1) == [found[0][:1]]  # half a character


def test_service_and_local_index_give_the_same_observations(service, retriever):
    own = parse_task({"name": "search_qa", "hops": [2]}).build()
    retriever.inner = own.retriever
    remote = parse_task({"name": "search_qa", "retriever_url": service.url}).build()
    queries = [query for i in range(40) for query in own._source.queries(own.train_problem(i, 0))]
    turns = [f"<search>{query}</search>" for query in queries]  # 80: more than one request
    episodes = [Episode()] * len(turns)
    assert remote.observe(episodes, turns) == own.observe(episodes, turns)
    assert len({observed.observation for observed in own.observe(episodes, turns)}) > 60


def test_top_k_has_a_default_and_health_is_told(service):
    assert [len(found) for found in post(service, '{"queries": ["town"]}')[1]["results"]] == [3]
    assert RetrieverClient(service.url).health() == {"status": "ok", "index": "bm25", "num_passages": 50}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "body"),
        (b"nonsense", 400, "body: Invalid JSON"),
        (b"\xff\xfe", 400, "body: Invalid JSON"),
        (b"[]", 400, "body"),
        (b"[" * 200_000, 400, "body"),
        (b"{}", 400, "queries: Field required"),
        (b'{"queries": []}', 400, "queries: List should have at least 1"),
        (b'{"queries": "word1"}', 400, "queries: Input should be a valid array"),
        (b'{"queries": [1]}', 400, r"queries.0: Input should be a valid string"),
        (b'{"queries": [null]}', 400, "queries.0"),
        (b'{"queries": ["\\ud800"]}', 400, "body: Invalid JSON"),
        (b'{"queries": ["a"], "top_k": 0}', 400, "top_k"),
        (b'{"queries": ["a"], "top_k": 101}', 400, "top_k"),
        (b'{"queries": ["a"], "top_k": "3"}', 400, "top_k"),
        (b'{"queries": ["a"], "top_k": 1e99}', 400, "top_k"),
        (b'{"queries": ["a"], "topk": 3}', 400, "topk: Extra inputs"),
        (json.dumps({"queries": ["a"] * 257}).encode(), 400, "queries: List should have at most 256"),
        (json.dumps({"queries": ["x" * 5000]}).encode(), 400, "queries.0: String should have at most 4096"),
        (
            json.dumps({"queries": ["x" * 1_000_000]}).encode(),
            400,
            "queries.0: String should have at most 4096",
        ),
        (json.dumps({"queries": ["x" * 2_000_000]}).encode(), 413, "send fewer queries"),
        (b'{"queries": ["break"]}', 500, "internal error"),
    ],
)
def test_bad_requests_are_refused_and_harm_nobody(service, caplog, body, status, message):
    got, answer = post(service, body)
    assert (got, message in answer["error"]) == (status, True), answer
    assert post(service, '{"queries": ["word7"]}')[1]["results"][0][0]["id"] == "p7"


def test_odd_queries_are_answered(service):
    odd = ["", " ", "\x00", "?!", "the of", "😀" * 100, "word7 " * 600, "' OR 1=1", "<search>", "\u202eword3"]
    status, answer = post(service, json.dumps({"queries": odd}))
    assert status == 200
    assert [found[0]["id"] if found else None for found in answer["results"]] == [
        None, None, None, None, None, None, "p7", None, None, "p3"
    ]  # fmt: skip


def test_the_longest_queries_that_a_task_sends_fit_into_a_request(service):
    longest = parse_task({"name": "search_qa", "max_query_chars": 1024}).max_query_chars
    queries = ["\U0001f600" * longest] * client.QUERIES_PER_REQUEST  # 12 bytes each in JSON
    assert RetrieverClient(service.url).search(queries, 3) == [[]] * len(queries)
    with pytest.raises(UserError, match="max_query_chars"):
        parse_task({"name": "search_qa", "max_query_chars": longest + 1})


def test_other_paths_methods_and_broken_requests_are_refused(service):
    assert post(service, "{}", path="/")[0] == 404
    assert b" 405 " in raw(service, b"DELETE /search HTTP/1.0\r\n\r\n").splitlines()[0]
    for head, body in (
        (b"", b""),
        (b"Transfer-Encoding: chunked\r\n", b"2\r\n{}\r\n0\r\n\r\n"),
        (b"Content-Length: -5\r\n", b""),
        (b"Content-Length: 5\r\nContent-Length: 6\r\n", b""),
    ):
        asked = b"POST /search HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + head + b"\r\n" + body
        assert b" 400 " in raw(service, asked).splitlines()[0]
    asked = b"POST /search HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    asked += 32 * (b"10000\r\n" + b" " * 65536 + b"\r\n") + b"0\r\n\r\n"
    assert b" 413 " in raw(service, asked).splitlines()[0]
    assert raw(service, b"nonsense\r\n\r\n")
    with socket.create_connection(service.server_address) as connection:  # gone in the middle of a body
        connection.sendall(b"POST /search HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert RetrieverClient(service.url).health()["status"] == "ok"


def dribble(service, data):
    """The answer to bytes that come one by one for ever."""
    with socket.create_connection(service.server_address, timeout=20) as connection:
        connection.sendall(data)
        connection.settimeout(0.05)
        while True:
            try:
                return connection.recv(1000)
            except TimeoutError:
                connection.sendall(b"a")


BEGUN = b"POST /search HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n"


@pytest.mark.parametrize("data", [BEGUN, BEGUN + b"\r\n"], ids=["head", "body"])
def test_a_request_that_does_not_end_is_given_up_however_often_bytes_come(service, monkeypatch, data):
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.4)
    assert b" 408 " in raw(service, data).splitlines()[0]
    assert b" 408 " in dribble(service, data).splitlines()[0]
    connection = http.client.HTTPConnection(*service.server_address, timeout=20)
    connection.request("GET", "/health")
    assert connection.getresponse().read()
    connection.sock.sendall(data)  # one more on the same connection
    assert b" 408 " in connection.sock.recv(1000)
    connection.close()


def test_an_answer_that_nobody_reads_is_given_up(service, retriever, monkeypatch):
    monkeypatch.setattr(server, "REQUEST_SECONDS", 0.4)
    monkeypatch.setattr(retriever, "search", lambda *_: [[Passage("p", "t", "x" * 50_000_000)]])
    with socket.create_connection(service.server_address) as connection:
        body = b'{"queries": ["a"]}'
        connection.sendall(b"POST /search HTTP/1.1\r\nHost: x\r\nContent-Length: 18\r\n\r\n" + body)
        assert eventually(lambda: service.server_state.total_requests == 1)
        assert eventually(lambda: not service.server_state.connections)


def eventually(holds):
    end = time.monotonic() + 20
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.02)
    return held


@pytest.mark.parametrize("limit", ["MAX_CONNECTIONS", "MAX_CONNECTIONS_PER_CLIENT"])
@pytest.mark.parametrize("data", [b"", BEGUN, BEGUN + b"\r\n{"], ids=["nothing", "head", "body"])
def test_connections_that_wait_lock_nobody_out(service, monkeypatch, limit, data):
    monkeypatch.setattr(server, limit, 3)
    waiting = [socket.create_connection(service.server_address, timeout=20) for _ in range(8)]
    for connection in waiting:
        with contextlib.suppress(OSError):  # displaced
            connection.sendall(data)
    for _ in range(5):
        assert RetrieverClient(service.url, num_tries=1).search(["word7"], 1)[0][0].id == "p7"
    assert len(service.server_state.connections) <= 3
    for connection in waiting:
        connection.close()


def test_a_token_is_asked_for_and_the_client_sends_it(retriever, monkeypatch):
    running = RetrieverServer(("127.0.0.1", 0), retriever, top_k=3, about={}, token="s3cret")
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    body = '{"queries": ["word7"]}'
    for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Bearer z\xfcge"}):
        status, answer = post(running, body, headers=headers)
        assert (status, "NEMO_GRPO_RETRIEVER_TOKEN" in answer["error"]) == (401, True)
    with pytest.raises(RetrieverError, match=r"refused /search: 401 .* set NEMO_GRPO_RETRIEVER_TOKEN"):
        RetrieverClient(running.url).search(["word7"], 1)
    monkeypatch.setenv("NEMO_GRPO_RETRIEVER_TOKEN", "s3cret")
    assert RetrieverClient(running.url).search(["word7"], 1)[0][0].id == "p7"
    running.stop()
    thread.join(10)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "node7"])
def test_other_machines_are_not_admitted_without_a_token(retriever, host):
    with pytest.raises(UserError, match=f"--host {host} admits .* export NEMO_GRPO_RETRIEVER_TOKEN"):
        RetrieverServer((host, 0), retriever, top_k=1, about={})


def test_one_connection_serves_many_requests_also_after_a_refusal(service):
    connection = http.client.HTTPConnection(*service.server_address, timeout=20)
    for body, status in (('{"queries": ["a"]}', 200), ("nonsense", 400), ('{"queries": ["word7"]}', 200)):
        connection.request("POST", "/search", body)
        response = connection.getresponse()
        assert (response.status, bool(response.read())) == (status, True)
    connection.close()


def test_many_clients_lose_nothing(service):
    def ask(number):
        found = RetrieverClient(service.url).search([f"word{(number + i) % 50}" for i in range(5)], 1)
        return [passages[0].id for passages in found] == [f"p{(number + i) % 50}" for i in range(5)]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(200)))


def test_beyond_the_limit_open_requests_stay_and_the_client_tries_again(service, retriever, monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(client, "FIRST_WAIT", 0.05)
    ask = RetrieverClient(service.url, num_tries=8).search
    with ThreadPoolExecutor(3) as pool:
        open_ones = [pool.submit(ask, ["wait", "word3"], 1) for _ in range(2)]
        assert eventually(lambda: len(service.server_state.tasks) == 2)
        late = pool.submit(ask, ["word7"], 1)
        threading.Timer(0.3, retriever.go_on.set).start()
        assert late.result(20)[0][0].id == "p7"
        assert [answer.result(20)[1][0].id for answer in open_ones] == ["p3", "p3"]


def test_stopping_answers_open_requests_and_closes_idle_connections(retriever):
    running = RetrieverServer(("127.0.0.1", 0), retriever, top_k=3, about={})
    accepting = threading.Thread(target=running.serve_forever)
    accepting.start()
    idle = socket.create_connection(running.server_address)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(RetrieverClient(running.url, num_tries=1).search, ["wait", "word7"], 1)
        assert retriever.arrived.wait(10)
        stopping = threading.Thread(target=running.stop)
        stopping.start()
        threading.Timer(0.2, retriever.go_on.set).start()
        assert [p.id for p in answer.result(20)[1]] == ["p7"]
    stopping.join(10)
    accepting.join(10)
    assert not stopping.is_alive()
    assert idle.recv(1) == b""
    idle.close()


def test_the_client_gives_up_after_its_tries_and_says_where(monkeypatch):
    waits = []
    monkeypatch.setattr(client.time, "sleep", waits.append)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(RetrieverError, match=rf"{url} gave no answer in 4 tries .*Connection refused.*serve"):
        RetrieverClient(url, num_tries=4).search(["a"], 1)
    assert waits == [0.5, 1.0, 2.0]


def test_client_retries_broken_answers_but_not_refusals(service, monkeypatch, caplog):
    waits = []
    monkeypatch.setattr(client.time, "sleep", waits.append)
    with pytest.raises(RetrieverError, match="500 internal error"):
        RetrieverClient(service.url, num_tries=2).search(["break"], 1)
    assert len(waits) == 1
    with pytest.raises(RetrieverError, match="refused /search: 400 top_k"):
        RetrieverClient(service.url).search(["a"], 1000)
    assert len(waits) == 1
    monkeypatch.setattr(RetrieverClient, "_once", lambda *_: {"results": []})
    with pytest.raises(RetrieverError, match="0 results for 1 queries"):
        RetrieverClient(service.url, num_tries=2).search(["a"], 1)


def test_a_slow_service_times_out(service, retriever, monkeypatch):
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    with pytest.raises(RetrieverError, match="timed out"):
        RetrieverClient(service.url, timeout=0.2, num_tries=2).search(["wait"], 1)


def test_an_address_in_use_is_refused(service, retriever):
    with pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1"):
        RetrieverServer(service.server_address, retriever, top_k=1, about={})


def test_the_command_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "nemo_grpo.tasks.retriever.server", None)
    monkeypatch.delattr("nemo_grpo.tasks.retriever.server", raising=False)
    with pytest.raises(UserError, match=r"pip install 'nemo-grpo\[search\]'"):
        retriever_command.serve(tmp_path / "corpus.jsonl")


def test_the_command_serves_until_sigterm(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": "a", "title": "Bern", "text": "capital"}\n')
    command = ["-m", "nemo_grpo.cli", "retriever", "serve", "--port", "0", "--corpus", str(corpus)]
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("1 passages at http://127.0.0.1:")
    assert RetrieverClient(line.split()[-1]).search(["capital"], 3)[0][0].title == "Bern"
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()
