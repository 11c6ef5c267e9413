"""A new model with random weights, and the tokenizer that is learnt from the task's texts."""

import json
import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_grpo.engine.new_model import starting_model, write_new_model
from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.own import NewModel
from nemo_grpo.support import shipped
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Prompt, encode_prompt, parse_task

SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 48, "max_position_embeddings": 128, "seed": 5,
}  # fmt: skip
PROMPT = Prompt(template="Q: {question}")
FILES = ("model.safetensors", "tokenizer.json", "config.json")


@pytest.fixture(scope="module")
def task():
    return parse_task({"name": "knights_knaves"}).build()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, task):
    return write_new_model(NewModel(**SIZES), task, tmp_path_factory.mktemp("new"))


def test_the_folder_is_a_complete_hugging_face_model(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == math.ceil(len(tokenizer) / 8) * 8
    assert len(tokenizer) <= SIZES["vocab_size"]
    generation = json.loads((folder / "generation_config.json").read_text())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generation["eos_token_id"] == tokenizer.eos_token_id == end


TEXT = "<think>1+2=3</think><answer>3</answer>Caf\u00e9 \u2713 47  + 8\n\ttabs \U0001f600"


@pytest.mark.parametrize("tag", ["<think>", "</think>", "<answer>", "</answer>"])
def test_the_tokenizer_keeps_tags_whole(folder, tag):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids(tag)) == 1


def test_the_tokenizer_round_trips_any_text(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT + "<|im_end|>", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT


def test_the_chat_template_ends_a_prompt_with_the_assistants_turn(folder, task):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problem = task.train_problem(0, 0)
    prompt = tokenizer.decode(encode_prompt(tokenizer, PROMPT, problem))
    assert prompt == f"<|im_start|>user\nQ: {problem.question}<|im_end|>\n<|im_start|>assistant\n"


def test_a_new_model_leaves_the_callers_random_numbers(task, tmp_path):
    torch.manual_seed(1234)
    state = torch.get_rng_state()
    write_new_model(NewModel(**SIZES), task, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_seed_gives_the_same_bytes(folder, task, tmp_path):
    torch.manual_seed(1234)
    random.seed(1234)
    write_new_model(NewModel(**SIZES), task, tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_another_seed_gives_other_weights(folder, task, tmp_path):
    write_new_model(NewModel(**(SIZES | {"seed": 6})), task, tmp_path)
    name = "model.safetensors"
    assert (tmp_path / name).read_bytes() != (folder / name).read_bytes()


def test_a_vocabulary_without_room_for_bytes_and_tags_is_refused(task, tmp_path):
    with pytest.raises(UserError, match=r"vocab_size=262 is too small.*at least 263"):
        write_new_model(NewModel(**(SIZES | {"vocab_size": 262})), task, tmp_path)


def test_a_run_starts_from_the_folder_that_its_recipe_names():
    recipe = load_recipe(shipped.recipe_file("quickstart"))
    with starting_model(recipe, recipe.task.build()) as folder:
        assert folder == shipped.model("quickstart")


def test_a_new_model_lasts_as_long_as_its_run():
    recipe = load_recipe(shipped.recipe_file("quickstart-sft"))
    with starting_model(recipe, recipe.task.build()) as folder:
        assert (folder / "model.safetensors").is_file()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["quickstart", "quickstart_search_qa"])
def test_a_shipped_policy_has_the_sizes_of_the_recipe_that_made_it(name):
    sizes = load_recipe(shipped.recipe_file(f"{name}-sft")).nemo_grpo.new_model
    config = json.loads((shipped.model(name) / "config.json").read_text())
    for size in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        assert config[size] == getattr(sizes, size)


def test_a_misspelt_shipped_policy_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        load_recipe(shipped.recipe_file("quickstart"), ["policy.model_name=${shipped_model:quikstart}"])
