"""The service and its client over real sockets, and the client against Search-R1's own form of answers."""

import http.client
import json
import socket
import subprocess
import sys
import threading

import pytest
import uvicorn

from nemo_grpo.cli import retriever as retriever_command
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import parse_task
from nemo_grpo.tasks.base import Episode
from nemo_grpo.tasks.retriever import Passage, RetrieverError, client
from nemo_grpo.tasks.retriever.bm25 import BM25Retriever
from nemo_grpo.tasks.retriever.client import RetrieverClient
from nemo_grpo.tasks.retriever.server import application, serve

PASSAGES = [Passage(f"p{i}", f"Town {i}", f"Town {i} has word{i} and züge") for i in range(50)]


class Breaking:
    """Fails for one query, waits for another."""

    def __init__(self, inner):
        self.inner, self.go_on = inner, threading.Event()

    def search(self, queries, top_k):
        if "break" in queries:
            raise RuntimeError("boom")
        if "wait" in queries:
            assert self.go_on.wait(20)
        return self.inner.search(queries, top_k)


@pytest.fixture
def retriever():
    return Breaking(BM25Retriever.in_memory(PASSAGES))


@pytest.fixture
def url(retriever):
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application(retriever, 3), lifespan="off", log_level="critical")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, args=([listening],))
    thread.start()
    yield "http://{}:{}".format(*listening.getsockname())
    retriever.go_on.set()
    running.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def client_of(url):
    return RetrieverClient(url, timeout=20.0)


def post(url, body, path="/retrieve", method="POST"):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    connection.request(method, path, body)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, text


def answered(url, **body):
    status, text = post(url, json.dumps(body))
    assert status == 200, text
    return json.loads(text)


def test_the_service_answers_in_search_r1s_form(url):
    first = PASSAGES[7]
    document = {"id": "p7", "title": "Town 7", "text": first.text, "contents": f"Town 7\n{first.text}"}
    asked = {"queries": ["word7", "nothing"], "topk": 2}
    answer = answered(url, **asked, return_scores=True)
    assert list(answer) == ["result"]
    found, nothing = answer["result"]
    assert found[0]["document"] == document
    assert found[0]["score"] > 0
    assert nothing == []
    assert answered(url, **asked) == {"result": [[document], []]}
    for default in ({}, {"topk": None}, {"topk": 0}):
        assert len(answered(url, queries=["town"], **default)["result"][0]) == 3
    assert answered(url, queries=[]) == {"result": []}


def test_passages_come_back_as_they_are(url, retriever):
    queries = ["word7", "nothing", "züge word3"]
    found = client_of(url).search(queries, 2)
    assert found == retriever.search(queries, 2)
    assert client_of(url + "/").search([], 2) == []
    assert client_of(url + "/retrieve").search(["word7"], 1) == [found[0][:1]]
    assert client_of(url).search(["\ud800 word7"], 1) == [found[0][:1]]  # half a character


def test_service_and_local_index_give_the_same_observations(url, retriever):
    own = parse_task({"name": "search_qa", "hops": [2]}).build()
    retriever.inner = own.retriever
    remote = parse_task({"name": "search_qa", "retriever_url": url}).build()
    queries = [query for i in range(40) for query in own._source.queries(own.train_problem(i, 0))]
    turns = [f"<search>{query}</search>" for query in queries]  # 80: more than one request
    observed = remote.observe([Episode()] * len(turns), turns)
    assert observed == own.observe([Episode()] * len(turns), turns)
    assert len({one.observation for one in observed}) > 60


def test_bad_requests_are_refused_and_harm_nobody(url):
    for body, told in (
        (b"\xff\xfe", "Invalid JSON"),
        (b"{}", "Field required"),
        (b'{"queries": "word1"}', "valid array"),
        (b'{"queries": ["a"], "topk": -1}', "greater than or equal to 0"),
    ):
        status, text = post(url, body)
        assert (status, told in text.decode()) == (422, True), text
    assert [post(url, "{}", path="/search")[0], post(url, None, method="GET")[0]] == [404, 405]
    assert answered(url, queries=["word7"])["result"][0][0]["id"] == "p7"


BERN = {"id": "17", "contents": '"Bern"\nBern is a capital.\nIt is old.'}
BASEL = {"id": 18, "contents": '"Basel"\nBasel is a town.'}
FORMS = {
    "E5 with scores": [{"document": BERN, "score": 0.83}, {"document": BASEL, "score": 0.5}],
    "BM25 with scores": [
        {"document": {"title": "Bern", "text": "Bern is a capital.\nIt is old."}, "score": 9.5},
        {"document": {"title": "Basel", "text": "Basel is a town.", "contents": "-"}, "score": 2.0},
    ],
    "without scores": [BERN, BASEL],
}


@pytest.mark.parametrize("form", FORMS)
def test_the_client_reads_the_answers_of_search_r1s_own_server(form, monkeypatch):
    """As its retrieval_server.py writes them for each of its retrievers."""
    asked = []
    answer = {"result": [FORMS[form]]}
    monkeypatch.setattr(RetrieverClient, "_once", lambda _, body: asked.append(json.loads(body)) or answer)
    (found,) = client_of("http://elsewhere:80/retrieve").search(["capital"], 2)
    assert asked == [{"queries": ["capital"], "topk": 2, "return_scores": True}]
    assert [(p.title, p.text) for p in found] == [
        ("Bern", "Bern is a capital.\nIt is old."),
        ("Basel", "Basel is a town."),
    ]
    assert found[0].score >= found[1].score


def test_the_client_retries_broken_answers_but_not_refusals(url, monkeypatch):
    waits = []
    monkeypatch.setattr(client.time, "sleep", waits.append)
    monkeypatch.setattr(client, "NUM_TRIES", 4)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(RetrieverError, match=r"gave no answer in 4 tries .*Connection refused.*serve"):
        client_of(nowhere).search(["a"], 1)
    assert waits == [0.5, 1.0, 2.0]
    monkeypatch.setattr(client, "NUM_TRIES", 2)
    with pytest.raises(RetrieverError, match="500 Internal Server Error"):
        client_of(url).search(["break"], 1)
    with pytest.raises(RetrieverError, match="timed out"):
        RetrieverClient(url, timeout=0.2).search(["wait"], 1)
    waits.clear()
    with pytest.raises(RetrieverError, match=r"refused /retrieve: 422 .*topk"):
        client_of(url).search(["a"], -1)
    assert not waits
    for answer, told in (
        ({"result": []}, "0 results for 1 queries"),
        ({"results": [[]]}, "KeyError: 'result'"),
        ({"result": [[{"document": {"id": 1}, "score": 1.0}]]}, "neither a .text. nor .contents"),
    ):
        monkeypatch.setattr(RetrieverClient, "_once", lambda *_, answer=answer: answer)
        with pytest.raises(RetrieverError, match=told):
            client_of(url).search(["a"], 1)


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
    assert client_of(line.split()[-1]).search(["capital"], 3)[0][0].title == "Bern"
    with pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1"):
        serve(application(None, 1), "127.0.0.1", int(line.split()[-1].rpartition(":")[2]), print)
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()
