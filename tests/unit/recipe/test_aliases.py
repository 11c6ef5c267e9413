"""Other libraries' names of a recipe's keys: one table for the advice and for the page."""

import json
import re
from pathlib import Path

import pytest

from nemo_grpo.recipe import load_recipe, refuse_unsupported
from nemo_grpo.recipe.keys import is_known
from nemo_grpo.support.aliases import advice_on, markdown, table
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants import VARIANTS

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "recipes/quickstart.yaml"


def test_every_key_of_the_table_is_a_recipes_key():
    assert [alias.key for alias in table() if alias.key and not is_known(alias.key)] == []


def test_the_page_holds_the_table():
    assert markdown() in (ROOT / "docs/coming_from.md").read_text()
    assert advice_on("temperature") == advice_on("nothing") == "", "the same here, and nowhere"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("++loss_fn.beta=0.1", "TRL's beta is loss_fn.reference_policy_kl_penalty"),
        ("++loss_fn.clip_ratio=0.1", "verl's clip_ratio is loss_fn.ratio_clip_min"),
        ("++grpo.num_generations=4", "TRL's num_generations is grpo.num_generations_per_prompt"),
        ("++policy.train_batch_size=5", "OpenRLHF's train_batch_size is policy.train_global_batch_size ("),
        ("++grpo.num_iterations=2", "TRL's num_iterations is not available (every response trains once)"),
        ("++grpo.steps_per_generation=2", "is policy.train_global_batch_size (below prompts x generations"),
        ("++grpo.n_samples_per_prompt=8", "OpenRLHF's and slime's n_samples_per_prompt is grpo.num_gen"),
        (
            "++policy.rollout_max_response_len=8",
            "slime's rollout_max_response_len is policy.gen",
        ),
        ("++grpo.group_size=8", "prime-rl's group_size is grpo.num_generations_per_prompt"),
        ("++loss_fn.importance_sampling_level=sequence", "GSPO is loss_fn.variant=gspo"),
        ("++use_vllm=true", "is policy.generation.backend (on a cluster; on this machine nemo_grpo.engine"),
        ("++policy.lora_r=8", "TRL's lora_r is policy.megatron_cfg.peft.dim (with peft.enabled: true)"),
        ("++policy.peft_config={r: 8}", "TRL's peft_config is policy.megatron_cfg.peft ({enabled: true"),
        ("++actor_rollout_ref.rollout.n=4", "verl's n is grpo.num_generations_per_prompt"),
        ("++actor_rollout_ref.actor.use_dynamic_bsz=true", "it is verl's, and no key here"),
        ("++critic.optim.lr=1", "critic is not a section of a recipe; it is verl's, and no key here"),
        (
            "++policy.megatron_cfg.scheduler.warmup_ratio=0.1",
            "TRL's warmup_ratio is policy.megatron_cfg.scheduler.lr_warmup_iters (updates, not a share",
        ),
        ("++max_completion_length=5", "TRL's max_completion_length is policy.generation.max_new_tokens"),
    ],
)
def test_a_name_of_another_library_is_answered_by_the_key(override, key):
    with pytest.raises(UserError) as error:
        load_recipe(QUICKSTART, [override])
    assert key in str(error.value)


def test_the_recipe_beside_trls_script_holds_trls_defaults(tmp_path, monkeypatch):
    page = (ROOT / "docs/coming_from.md").read_text()
    blocks = re.findall(r"```(?:yaml|python)\n# (\S+)\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in blocks] == ["brief.yaml", "my_rewards.py"]
    monkeypatch.chdir(tmp_path)
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    lines = [{"prompt": f"{i}+1?", "solution": str(i + 1)} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = load_recipe(tmp_path / "brief.yaml")
    refuse_unsupported(recipe)
    assert recipe.policy.train_global_batch_size == 8 * 4, "per_device_train_batch_size x accumulation"
    loss = recipe.loss_fn
    assert (loss.aggregation, loss.reference_policy_kl_penalty) == ("token_mean", 0.0)
    assert (loss.ratio_clip_min, loss.ratio_clip_max, loss.normalize_rewards) == (0.2, 0.2, True)
    assert VARIANTS["dapo"]().ratio_clip_max == 0.28
    assert VARIANTS["dapo"]().aggregation == VARIANTS["grpo"]().aggregation == "token_mean"


def test_swapping_task_or_variant_names_the_way_to_drop_inherited_keys():
    logic = ROOT / "recipes/tr_grpo/tr_grpo-qwen2.5-7b-instruct-1m-logic-1n8g.yaml"
    with pytest.raises(UserError, match=r"for logic.*_override_: true in the section"):
        load_recipe(QUICKSTART, ["nemo_grpo.task.name=math", "++nemo_grpo.task.people=[2]"])
    with pytest.raises(UserError, match=r"is not a parameter of gpg but of .*_override_: true all of them"):
        load_recipe(logic, ["loss_fn.variant=gpg"])
