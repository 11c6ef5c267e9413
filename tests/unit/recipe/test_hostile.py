"""Recipes that no editor writes: a message for each, and neither a traceback nor a long wait."""

import pytest

from nemo_grpo.experiments.sweep import is_sweep
from nemo_grpo.recipe import load_recipe
from nemo_grpo.support.errors import UserError

NINES = "9" * 5000
FILES = {
    "digits": (f"grpo: {{seed: {NINES}}}", "4300 digits"),
    "bits": (f"grpo: {{seed: 0x{'f' * 5000}}}", "grpo.seed: an integer of 20000 bits"),
    "lists": (f"data: {{x: {'[' * 5000}{']' * 5000}}}", "nested too deeply"),
    "sections": (f"data: {'{a: ' * 3000}1{'}' * 3000}", "nested too deeply"),
    "interpolations": (f"grpo: {{seed: '{'${' * 500}a{'}' * 500}'}}", "nested|recursion"),
    "nul": ("grpo: {seed: 1\0}", "not valid YAML.*x0000"),
    "escaped nul": ('nemo_grpo: {run_name: "a\\0b"}', "nemo_grpo.run_name: a text with a NUL"),
    "dots": ("grpo.seed: 7", "^grpo.seed=7: .*write `grpo: {seed: 7}`$"),
    "dots in a section": (
        "policy: {megatron_cfg.optimizer.lr: 1.0e-9}",
        "^policy.megatron_cfg.optimizer.lr=1e-09: .*`megatron_cfg: {optimizer: {lr: 1e-09}}` below policy$",
    ),
    "date": ("grpo: {seed: 2001-99-99}", "is a text; it must be an integer"),
    "tag": ("grpo: {seed: !!python/object/apply:os.system [x]}", "not valid YAML.*os.system"),
    "no mapping": ("3", "cannot be read"),
    "long text": ("nemo_grpo: {run_name: '${mul:aaaaaaaaaa,1000000000}'}", "mul takes numbers"),
    "long number": (f"grpo: {{seed: '${{mul:{NINES[:4000]},{NINES[:4000]}}}'}}", "grpo.seed: an integer of"),
    "seed": ("grpo: {seed: 1e23}", "seed=1e.23 is a float; it must be an integer"),
    "64 bits": ("grpo: {seed: 5000000000}", "seed=5000000000 must be less than 4294967296"),
    "reward": ("nemo_grpo: {rewards: {accuracy: 1.0e308}}", "accuracy: 1e.308 is infinite in the float32"),
    "temperature": (
        "policy: {generation: {temperature: 1.0e-300}}",
        "temperature: 1e-300 is 0 in the float32",
    ),
    "relative": ("loss_fn: {variant: '.x:y'}", "variant=.x:y: '.x' is no module"),
    "task": ("nemo_grpo: {task: {name: '.x:y'}}", "'.x' is no module"),
    "own reward": ("nemo_grpo: {rewards: {'.x:y': 1}}", "'.x' is no module"),
}


@pytest.mark.parametrize(("text", "message"), FILES.values(), ids=FILES)
def test_hostile_recipe_is_refused_with_a_message(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"defaults: nemo_grpo://quickstart.yaml\n{text}\n")
    if text == "3":
        path.write_text(text)
    assert not is_sweep(path)
    with pytest.raises(UserError, match=message):
        load_recipe(path)


@pytest.mark.parametrize(
    "override", [f"grpo.seed={NINES}", f"data.x={'[' * 5000}", "nemo_grpo.run_name=a\0b"]
)
def test_hostile_override_is_refused_with_a_message(override):
    with pytest.raises(UserError, match=r"4300 digits|nested too deeply|not valid YAML"):
        load_recipe("quickstart", [override])


def test_dots_are_left_alone_where_users_choose_the_names(tmp_path):
    path, own = tmp_path / "recipe.yaml", tmp_path / "own.py"
    own.write_text("def brevity(response):\n    return -len(response)\n")
    path.write_text(
        "defaults: nemo_grpo://quickstart.yaml\n"
        f"logger: {{wandb: {{a.b: 1}}}}\nnemo_grpo: {{rewards: {{'{own}:brevity': 1}}}}\n"
    )
    assert f"{own}:brevity" in load_recipe(path).nemo_grpo.rewards
