"""Prompts are encoded before a run starts, those of the same files only once."""

import json

import pytest

from nemo_grpo.engine.checked_prompts import check_training_prompts
from nemo_grpo.engine.warm_start_tokenizer import build_tokenizer
from nemo_grpo.tasks import Problem, Prompt, encode_prompt, parse_task
from nemo_grpo.tasks.prompts import encode_many


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(parse_task({"name": "knights_knaves"}).build(), 300, 0)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(encoded questions of a start, the training file, the model's folder, a start)."""
    monkeypatch.chdir(tmp_path)
    source, file = tmp_path / "model", tmp_path / "train.jsonl"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    rows = [{"id": str(n), "question": f"What is {n}?", "answer": str(n)} for n in range(100)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(settings="limit 8", encode=None):
        task = parse_task({"name": "math", "train_files": [str(file)]}).build()
        encoded = list[str]()
        check_training_prompts(
            task, encode or (lambda part: encoded.extend(p.id for p in part)), 0, source, settings
        )
        return encoded

    return start, file, source


def test_all_prompts_are_encoded_once(run):
    start, _, _ = run
    assert sorted(start(), key=int) == [str(n) for n in range(100)]
    assert start() == []


def test_another_file_tokenizer_or_limit_is_checked_again(run):
    start, file, source = run
    start()
    assert len(start("limit 9")) == 100
    (source / "tokenizer.json").write_text("[]")
    assert len(start()) == 100
    file.write_text(file.read_text().replace("What is 7?", "What was 7?"))
    assert len(start()) == 100


def test_prompts_that_failed_are_checked_again(run):
    start, _, _ = run

    def refuse(part):
        raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        start(encode=refuse)
    assert len(start()) == 100


@pytest.mark.parametrize("use_chat_template", [True, False])
def test_many_prompts_are_encoded_as_one_by_one(tokenizer, use_chat_template):
    prompt = Prompt(system="Think.", response_prefix="<think>", use_chat_template=use_chat_template)
    problems = [Problem(str(n), f"{n} + {n * n}", "0", {}) for n in range(5)]
    assert encode_many(tokenizer, prompt, problems) == [encode_prompt(tokenizer, prompt, p) for p in problems]
    assert encode_many(tokenizer, prompt, []) == []
