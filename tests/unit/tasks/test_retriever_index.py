"""Corpora and indices: BM25's numbers by hand, caches that are never stale."""

import json
import math
import os

import pytest

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks.retriever import Passage
from nemo_grpo.tasks.retriever.bm25 import BM25Retriever
from nemo_grpo.tasks.retriever.corpus import Corpus, index_folder, indexed_text

TEXTS = ["red fox jumps", "blue fox sleeps", "green owl", "green owl", "red red crow"]


def write(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "c.jsonl", [{"id": f"p{i}", "text": text} for i, text in enumerate(TEXTS)])


def ids(found):
    return [[passage.id for passage in passages] for passages in found]


def test_a_corpus_is_read_by_number(tmp_path):
    entries = [
        '{"id": 7, "title": "Zürich", "text": "Stadt\\nam See"}',
        r'{"id": "b", "contents": "\"Bern\"\nCapital.\nOld."}',
        '{"contents": "no title"}',
    ]
    (tmp_path / "c.jsonl").write_text("\n\n".join(entries), encoding="utf-8")
    corpus = Corpus(tmp_path / "c.jsonl")
    assert list(corpus) == [
        Passage("7", "Zürich", "Stadt\nam See"),
        Passage("b", "Bern", "Capital.\nOld."),
        Passage("2", "", "no title"),
    ]
    assert corpus[-1] == corpus[2]
    assert corpus[::2] == [corpus[0], corpus[2]]
    assert indexed_text(corpus[0]) == "Zürich\nStadt\nam See"
    with pytest.raises(IndexError):
        corpus[3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"text": "a"}\nnonsense\n', r"c\.jsonl:2: not JSON"),
        ('{"text": "a"}\n\n[1]\n', r"c\.jsonl:3: a JSON array"),
        ('{"text": 3}\n', r"c\.jsonl:1: neither"),
    ],
)
def test_what_is_no_corpus_is_refused_with_its_line(tmp_path, content, message):
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        list(Corpus(tmp_path / "c.jsonl"))
    with pytest.raises(UserError, match="No such file"):
        Corpus(tmp_path / "none.jsonl")


def test_bm25_scores_are_lucenes():
    found = BM25Retriever.in_memory([Passage(str(i), "", text) for i, text in enumerate(TEXTS)])
    (passages,) = found.search(["fox jumps"], 5)
    # lengths 3, 3, 2, 2, 3: mean 2.6; idf = ln(1 + (5 - df + 0.5)/(df + 0.5)), df 2 and 1; tf = 1 everywhere
    weight = 1 / (1 + 1.5 * (1 - 0.75 + 0.75 * 3 / 2.6))
    fox, jumps = math.log(1 + 3.5 / 2.5) * weight, math.log(1 + 4.5 / 1.5) * weight
    assert [p.id for p in passages] == ["0", "1"]
    assert [p.score for p in passages] == pytest.approx([fox + jumps, fox], rel=1e-5)


def test_bm25_finds_an_accent_in_both_of_its_spellings():
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    retriever = BM25Retriever.in_memory([Passage("0", "", composed), Passage("1", "", decomposed)])
    assert ids(retriever.search([composed, decomposed], 2)) == [["0", "1"]] * 2


def test_equal_scores_keep_the_order_and_unrelated_passages_are_not_returned(corpus, tmp_path):
    retriever = BM25Retriever.of_file(corpus)
    assert ids(retriever.search(["owl", "red", "unicorn", "", "the of and", "?!", "\ud800 owl"], 10)) == [
        ["p2", "p3"], ["p4", "p0"], [], [], [], [], ["p2", "p3"],
    ]  # fmt: skip
    assert ids(retriever.search(["owl"], 1)) == [["p2"]]


def test_the_index_is_built_once_and_again_when_the_corpus_changes(corpus, tmp_path, monkeypatch):
    from nemo_grpo.tasks.retriever import bm25

    built = []
    build = bm25._build
    monkeypatch.setattr(bm25, "_build", lambda passages: built.append(1) or build(passages))
    first = BM25Retriever.of_file(corpus).search(["red crow"], 3)
    assert BM25Retriever.of_file(corpus).search(["red crow"], 3) == first
    assert len(built) == 1
    assert (tmp_path / "c.jsonl.bm25").is_dir()
    write(corpus, [{"text": "a new crow"}])
    os.utime(corpus, ns=(1, 1))
    assert [p.text for p in BM25Retriever.of_file(corpus).search(["crow"], 3)[0]] == ["a new crow"]
    assert len(built) == 2
    assert sorted(os.listdir(tmp_path)) == ["c.jsonl", "c.jsonl.bm25"]  # nothing else is left behind


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def fail(target):
        (target / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        index_folder(tmp_path / "index", {"a": 1}, fail)
    assert os.listdir(tmp_path) == []


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="holds something else"):
        index_folder(tmp_path / "mine", {"a": 1}, lambda target: None)
    assert (tmp_path / "mine" / "thesis.tex").exists()
