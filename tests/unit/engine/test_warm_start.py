"""What the warm start makes, and that its cache can be trusted."""

import json
import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_grpo.engine import warm_start as module
from nemo_grpo.engine.warm_start import cache_key, starting_policy, supervised_recipe
from nemo_grpo.recipe import Recipe, load_recipe
from nemo_grpo.recipe.own import WarmStart
from nemo_grpo.support import shipped
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Prompt, encode_prompt, parse_task

TINY = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48, "max_position_embeddings": 128, "num_steps": 6,
    "batch_size": 4, "lr": 3e-3, "seed": 5,
}  # fmt: skip
PROMPT = Prompt(template="Q: {question}")


@pytest.fixture(scope="module")
def task():
    return parse_task({"name": "knights_knaves"}).build()


def config(cache_dir, **changes):
    return WarmStart(**{**TINY, "cache_dir": str(cache_dir), **changes})


def recipe(cache_dir, **changes) -> Recipe:
    """The quickstart with a tiny warm start."""
    made = load_recipe(shipped.recipe_file("quickstart"))
    own = {"warm_start": config(cache_dir, **changes), "prompt": PROMPT}
    return made.model_copy(update={"nemo_grpo": made.nemo_grpo.model_copy(update=own)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return starting_policy(recipe(tmp_path_factory.mktemp("cache") / "new"))


def test_the_result_is_a_complete_hugging_face_folder(folder):
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "generation_config.json",
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == math.ceil(len(tokenizer) / 8) * 8
    assert len(tokenizer) <= TINY["vocab_size"]
    generation = json.loads((folder / "generation_config.json").read_text())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generation["eos_token_id"] == tokenizer.eos_token_id == end
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_tokenizer_has_tags_round_trips_any_text_and_ends_a_prompt(folder, task):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<think>1+2=3</think><answer>3</answer>Caf\u00e9 \u2713 47  + 8\n\ttabs \U0001f600"
    ids = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert ids.count(tokenizer.convert_tokens_to_ids(tag)) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    problem = task.train_problem(0, 0)
    prompt = tokenizer.decode(encode_prompt(tokenizer, PROMPT, problem))
    assert prompt == f"<|im_start|>user\nQ: {problem.question}<|im_end|>\n<|im_start|>assistant\n"


def test_learning_rate_rises_for_thirty_updates_and_falls_to_a_tenth(tmp_path):
    megatron = supervised_recipe(recipe(tmp_path, num_steps=120, lr=3.0), tmp_path).policy.megatron_cfg
    optimizer, scheduler = megatron.optimizer, megatron.scheduler
    assert (optimizer.lr, optimizer.min_lr) == (3.0, pytest.approx(0.3))
    assert (scheduler.lr_warmup_iters, scheduler.lr_decay_iters) == (30, 120)
    assert scheduler.lr_decay_style == "cosine"
    short = supervised_recipe(recipe(tmp_path, num_steps=6), tmp_path)
    assert short.policy.megatron_cfg.scheduler.lr_warmup_iters == 1  # a quarter of a short training


def test_the_same_settings_give_the_same_bytes_and_are_made_once(folder, tmp_path, monkeypatch):
    torch.manual_seed(1234)
    random.seed(1234)
    state = torch.get_rng_state()
    again = starting_policy(recipe(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)
    assert again.name == folder.name
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()
    monkeypatch.setattr(module, "build_tokenizer", None)  # a second call makes nothing
    assert starting_policy(recipe(tmp_path)) == again


def test_every_setting_has_its_own_cache_entry(task, monkeypatch):
    keys = [cache_key(config("a"), task, PROMPT)]
    for name, value in TINY.items():
        changed = {"num_attention_heads": 1, "num_key_value_heads": 2}.get(name, value * 2)
        keys.append(cache_key(config("a", **{name: changed}), task, PROMPT))
    keys.append(cache_key(config("a"), task, Prompt()))
    keys.append(cache_key(config("a"), task, Prompt(system="s", template=PROMPT.template)))
    other = parse_task({"name": "knights_knaves", "split": "statements"}).build()
    keys.append(cache_key(config("a"), other, PROMPT))
    assert cache_key(config("a"), task, PROMPT) == cache_key(config("b"), task, PROMPT)
    monkeypatch.setattr(module, "FORMAT_VERSION", module.FORMAT_VERSION + 1)
    keys.append(cache_key(config("a"), task, PROMPT))
    monkeypatch.setattr(type(task), "demonstration", lambda self, problem, rng: problem.answer)
    keys.append(cache_key(config("a"), task, PROMPT))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_nothing_behind(tmp_path, task, monkeypatch, failure):
    def fail(*args):
        raise failure

    monkeypatch.setattr(module, "_publish", fail)
    with pytest.raises(failure):
        starting_policy(recipe(tmp_path, num_steps=1))
    assert list(tmp_path.iterdir()) == []


def test_the_loser_of_a_race_keeps_the_winners_folder(tmp_path, task, monkeypatch):
    settings = recipe(tmp_path, num_steps=1)
    publish = module._publish

    def publish_after_another(unfinished, target):
        target.mkdir()
        (target / "winner").touch()
        publish(unfinished, target)

    monkeypatch.setattr(module, "_publish", publish_after_another)
    target = starting_policy(settings)
    assert [path.name for path in target.iterdir()] == ["winner"]
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 262}, "vocab_size=262 is too small.*at least 263"),
        ({"max_position_embeddings": 20}, r"nemo_grpo\.warm_start: .*=20: .* has \d+ tokens"),
    ],
)
def test_impossible_settings_are_user_errors_and_leave_nothing(tmp_path, task, changes, message):
    with pytest.raises(UserError, match=message):
        starting_policy(recipe(tmp_path, **changes))
    assert list(tmp_path.iterdir()) == []
    assert not torch.distributed.is_initialized()


def test_a_cache_that_cannot_be_written_is_a_user_error(tmp_path, task):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cache_dir=.* cannot be written"):
        starting_policy(recipe(tmp_path / "file" / "cache"))
