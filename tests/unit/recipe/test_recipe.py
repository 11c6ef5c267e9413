"""Validation as a whole: types, unknown keys, defaults, round trips, and every shipped recipe."""

from functools import cache
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from nemo_grpo.cli import app
from nemo_grpo.recipe import advice, load_recipe, load_recipe_dict, refuse_unsupported
from nemo_grpo.recipe.keys import is_known
from nemo_grpo.recipe.sections import metric_key
from nemo_grpo.recipe.validation import DERIVED_DEFAULTS
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError
from nemo_grpo.variants import VARIANTS

RECIPES = Path(__file__).parents[3] / "recipes"
SHIPPED = sorted(p for p in RECIPES.rglob("*.yaml") if not {"base", "sweeps"} & {*p.parts})


@cache
def shipped(path):
    """A shipped recipe, loaded once for the tests of this file."""
    return load_recipe(path)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_recipe_survives_a_round_trip(path, tmp_path):
    recipe = shipped(path)
    (tmp_path / "resolved.yaml").write_text(recipe.to_yaml())
    again = load_recipe(tmp_path / "resolved.yaml")
    assert again == recipe
    assert again.to_yaml() == recipe.to_yaml()
    assert advice(again) == advice(recipe), "writing defaults out changes nothing"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_recipe_breaks_no_rule_of_its_engine(path):
    recipe = shipped(path)
    if recipe.nemo_grpo.target == "embedded":
        refuse_unsupported(recipe)
    if path.stem.startswith("quickstart-"):
        assert recipe.loss_fn.variant == path.stem.split("-")[1]
        assert recipe.nemo_grpo.run_name == path.stem


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_quickstart_takes_every_variant_on_the_command_line(variant):
    recipe = load_recipe(RECIPES / "quickstart.yaml", [f"loss_fn.variant={variant}"])
    assert type(recipe.loss_fn) is VARIANTS[variant]
    recipe.loss_fn.build()


def test_not_given_keys_follow_the_key_they_depend_on(tree):
    tree["policy"]["generation"]["temperature"] = 0.7
    tree["policy"]["megatron_cfg"]["optimizer"]["weight_decay"] = 0.3
    tree["policy"]["max_grad_norm"] = 0.5
    recipe = load_recipe_dict(tree)
    assert recipe.policy.tokenizer.name == "some/model"
    assert recipe.policy.logprob_batch_size == 4
    assert recipe.policy.generation_batch_size == 8
    assert recipe.policy.generation.val_temperature == 0.7
    assert recipe.policy.megatron_cfg.scheduler.end_weight_decay == 0.3
    assert recipe.policy.megatron_cfg.optimizer.clip_grad == 0.5
    assert recipe.grpo.reward_shaping.max_response_length == 16
    assert recipe.loss_fn.max_response_length == 16
    assert recipe.nemo_grpo.evaluation.temperature == 0.7
    assert recipe.nemo_grpo.evaluation.num_problems == 256
    tree["policy"]["generation"]["val_temperature"] = 0.1
    assert load_recipe_dict(tree).policy.generation.val_temperature == 0.1
    assert [key for pair in DERIVED_DEFAULTS.items() for key in pair if not is_known(key)] == []


@pytest.mark.parametrize("base", ["quickstart", "cluster-quickstart"])
def test_one_setting_switches_validation_off(base):
    recipe = load_recipe(RECIPES / f"{base}.yaml", ["grpo.val_period=0"])
    assert not recipe.grpo.validates
    assert (recipe.settings["grpo"]["val_at_start"], recipe.to_dict()["grpo"]["val_at_end"]) == (False, False)
    assert load_recipe(RECIPES / f"{base}.yaml").grpo.val_at_end
    last = load_recipe(RECIPES / f"{base}.yaml", ["grpo.val_period=0", "grpo.val_at_end=true",
                                                  "checkpointing.metric_name=null"])  # fmt: skip
    assert (last.grpo.val_at_start, last.grpo.val_at_end) == (False, True)


def test_validation_keys_of_nemo_rl_set_the_evaluation_unless_it_is_given(tree):
    tree["grpo"] |= {"max_val_samples": 9, "val_num_generations_per_prompt": 3}
    evaluation = load_recipe_dict(tree, ["nemo_grpo.evaluation.num_samples=5"]).nemo_grpo.evaluation
    assert (evaluation.num_problems, evaluation.num_samples) == (9, 5)
    greedy = load_recipe_dict(tree, ["policy.generation.val_temperature=0"])
    assert greedy.nemo_grpo.evaluation.temperature == 0


def test_derived_sizes(tree):
    tree["policy"] |= {"train_global_batch_size": 4, "train_micro_batch_size": 2}
    tree["policy"]["megatron_cfg"] |= {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    tree["cluster"] = {"gpus_per_node": 4, "num_nodes": 2}
    recipe = load_recipe_dict(tree)
    assert (recipe.world_size, recipe.model_parallel_size, recipe.data_parallel_size) == (8, 4, 2)
    assert (recipe.num_sequences_per_step, recipe.num_updates_per_step) == (8, 2)
    assert recipe.checkpoint_dir == Path("runs/test/checkpoints")


def test_gpus_that_only_sample_do_not_train():
    apart = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2, num_nodes: 3}}"
    small = ["cluster={num_nodes: 4, gpus_per_node: 2}", "policy.train_micro_batch_size=16"]
    for overrides, sizes in ((small, (8, 0, 8)), ([*small, apart], (2, 6, 2))):
        recipe = load_recipe("cluster-quickstart", overrides)
        assert (recipe.world_size, recipe.num_rollout_gpus, recipe.data_parallel_size) == sizes


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("++policy.generation.fault_tolerance.enabled=true", "policy.generation.fault_tolerance"),
        ("++grpo.length_penalty={coefficient: 0.1}", "grpo.length_penalty"),
        ("++policy.megatron_cfg.zero_train_gen_mismatch=true", "policy.megatron_cfg.zero_train_gen_mismatch"),
        ("++checkpointing.load_replay_buffer=false", "checkpointing.load_replay_buffer"),
    ],
)
def test_keys_of_a_newer_nemo_rl_are_called_so(tree, override, key):
    with pytest.raises(UserError, match=rf": {key} is of a later NeMo-RL \(its pull request \d+\)"):
        load_recipe_dict(tree, [override])


def test_a_misspelt_key_is_named_beside_the_mandatory_one_that_it_leaves_open(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"policy": {"model_name": "???"}}))
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: base.yaml\npolicy: {model_name_or_path: Qwen/Qwen3-0.6B}\n")
    with pytest.raises(UserError) as error:
        load_recipe(mine)
    unknown, missing = error.value.errors
    assert unknown.startswith("policy.model_name_or_path=")
    assert "TRL's model_name_or_path is policy.model_name" in unknown
    assert missing.startswith("policy.model_name=???: the recipe leaves this to you")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.max_num_stps=3", "grpo.max_num_stps=3: .*is not a key of grpo; did you mean 'max_num_steps'?"),
        ("policy.adam_beta1=.9", "did you mean policy.megatron_cfg.optimizer.adam_beta1?"),
        ("grpoo=1", "grpoo is not a section of a recipe; did you mean 'grpo'?"),
        ("loss_fn.ratio_clp_min=.2", "did you mean 'ratio_clip_min'?"),
        ("loss_fn.variant=grpoo", "did you mean 'grpo'?"),
        ("nemo_grpo.runs_dirr=x", "is not a key of nemo_grpo; did you mean 'runs_dir'?"),
        ("nemo_grpo.task.splitt=x", "did you mean 'split'?"),
        ("policy.generation.vllm_cfg.max_modl_len=3", "vllm_cfg is not|did you mean 'max_model_len'?"),
    ],
)
def test_unknown_keys_name_the_nearest(tree, override, message):
    tree["policy"]["generation"]["vllm_cfg"] = {}
    with pytest.raises(UserError, match=message) as raised:
        load_recipe_dict(tree, [override])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.seed=abc", 'grpo.seed="abc" is a text; it must be an integer'),
        ("grpo.seed=-1", "grpo.seed=-1 must be at least 0"),
        ("grpo.seed=true", "grpo.seed=true is a boolean; it must be an integer"),
        ("grpo.max_num_steps=2.5", "must be an integer"),
        ("grpo.max_num_steps=0", "grpo.max_num_steps=0 must be greater than 0"),
        ("grpo.use_dynamic_sampling=1", "must be true or false"),
        ("policy.megatron_cfg.optimizer.lr='1e-6'", 'lr="1e-6" is a text; it must be a number'),
        ("policy.generation.temperature=0", "temperature=0 must be at least 0.01"),
        ("policy.generation.temperature=.inf", "be a finite number"),
        ("policy.precision=fp32", "must be one of 'auto', 'float32', 'bfloat16' or 'float16'"),
        ("policy.generation.stop_strings=x", "must be a list"),
        ("policy.generation.max_new_tokens=abc", 'max_new_tokens="abc" is a text'),
        ("policy.generation.top_p=1.5", "must be at most 1"),
        ("loss_fn=grpo", "must be a section of keys"),
        ("loss_fn.ratio_clip_min=-1", "loss_fn.ratio_clip_min=-1"),
        (
            "nemo_grpo.rewards.acuracy=1",
            "nemo_grpo.rewards.acuracy=1.0: task 'knights_knaves' has no such reward component; did you mean "
            "'accuracy'?",
        ),
    ],
)
def test_wrong_values_say_key_value_and_rule(tree, override, message):
    with pytest.raises(UserError) as raised:
        load_recipe_dict(tree, [override])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_preset_fills_in_the_prompt(tree):
    prompt = load_recipe_dict(tree, ["++nemo_grpo.prompt.preset=tr_grpo_math"]).nemo_grpo.prompt
    assert prompt.template.startswith("{question} Let's think step by step")
    assert (prompt.system, prompt.use_chat_template) == (None, False)


def test_keys_beside_a_preset_take_precedence(tree):
    changed = ["++nemo_grpo.prompt.preset=tr_grpo_math", "++nemo_grpo.prompt.use_chat_template=true"]
    assert load_recipe_dict(tree, changed).nemo_grpo.prompt.use_chat_template is True


def test_all_errors_are_reported_at_once(tree):
    overrides = ["grpo.sed=1", "loss_fn.variant=grpoo", "nemo_grpo.runname=x", "cluster={num_nodes: 0}"]
    missing = [f"{section} is missing" for section in ("grpo", "loss_fn", "policy", "nemo_grpo")]
    wrong = ["grpo.sed=1", "loss_fn.variant", "nemo_grpo.runname", "cluster.num_nodes=0"]
    for given, changes, parts in ((tree, overrides, wrong), ({}, [], missing)):
        with pytest.raises(UserError, match=r"^4 errors") as raised:
            load_recipe_dict(given, changes)
        assert all(part in str(raised.value) for part in parts)


def test_free_form_sections_take_any_key(tree):
    overrides = [
        "data.train.any=1",
        "env.my_env.any=1",
        "policy.megatron_cfg.env_vars.NVTE_DEBUG='1'",
        "policy.generation.vllm_kwargs.any.thing=1",
        "logger.wandb.any=1",
    ]
    recipe = load_recipe_dict(tree, overrides)
    assert recipe.env.model_extra == {"my_env": {"any": 1}}
    assert recipe.to_dict()["policy"]["megatron_cfg"]["env_vars"] == {"NVTE_DEBUG": "1"}
    with pytest.raises(UserError, match=r"data\.trian"):
        load_recipe_dict(tree | {"data": {"trian": {"x": 1}}})


def test_recipe_is_frozen(tree):
    recipe = load_recipe_dict(tree)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.grpo.seed = 3


def test_whole_numbers_are_numbers_or_names_by_their_key(tree):
    recipe = load_recipe_dict(tree, ["policy.max_grad_norm=2", "nemo_grpo.run_name=7"])
    assert (recipe.policy.max_grad_norm, recipe.nemo_grpo.run_name) == (2, "7")


def test_resolved_recipe_has_every_default(tree):
    dumped = yaml.safe_load(load_recipe_dict(tree).to_yaml())
    assert dumped["loss_fn"]["ratio_clip_min"] == 0.2
    assert dumped["nemo_grpo"]["engine"]["generator"] == "auto"
    assert dumped["nemo_grpo"]["task"] == {"name": "knights_knaves", "split": "problem"}


def test_metric_key_translates_nemo_rl_names():
    keys = {"val:accuracy": "validation/accuracy", "accuracy": "validation/accuracy", None: None}
    keys |= {"validation/pass@8": "validation/pass@8", "train:reward/mean": "reward/mean"}
    assert {name: metric_key(name) for name in keys} == keys


def test_secrets_of_the_environment_are_used_and_never_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "hunter2")
    monkeypatch.setenv("SEED", "11")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        """
        defaults: nemo_grpo://quickstart.yaml
        grpo: {seed: "${oc.decode:${oc.env:SEED}}"}
        policy: {model_name: "models/${oc.env:TOKEN}", tokenizer: {_override_: true, chat_template: default}}
        logger: {wandb: {key: "${oc.env:TOKEN}", url: "https://${.key}@x", keys: [1, "${oc.env:TOKEN}"],
                         name: '\\${oc.env:TOKEN}', entity: "${oc.env:NOBODY,me}"}}
        """
    )
    recipe = load_recipe(path)
    wandb = value_of(recipe, "logger.wandb")
    assert (wandb["key"], wandb["url"], wandb["keys"]) == ("hunter2", "https://hunter2@x", [1, "hunter2"])
    assert recipe.policy.tokenizer.name == "models/hunter2"  # copied from model_name
    shown = CliRunner().invoke(app, ["recipe", "resolve", str(path)]).output
    assert shown.strip() == recipe.to_yaml().strip()
    assert "hunter2" not in shown + str(recipe.to_dict())
    assert recipe.to_dict()["policy"]["tokenizer"]["name"] == "models/${oc.env:TOKEN}"
    assert recipe.to_dict()["grpo"]["seed"] == 11  # a number is what the run computed with
    path.write_text(recipe.to_yaml())
    again = load_recipe(path)
    assert again == recipe
    assert value_of(again, "logger.wandb.name") == "${oc.env:TOKEN}"
    monkeypatch.delenv("TOKEN")
    with pytest.raises(UserError, match="Environment variable 'TOKEN' not found"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("name", "by_tokens"),
    [
        ("quickstart", "policy.sequence_packing.enabled"),
        ("cluster-quickstart", "policy.sequence_packing.enabled"),
        ("cluster-quickstart", "policy.dynamic_batching.enabled"),
    ],
)
def test_a_microbatch_of_tokens_lets_an_update_be_any_multiple_of_the_ranks(name, by_tokens):
    small = ["policy.train_global_batch_size=4", "policy.train_micro_batch_size=32"]
    packing, dynamic = "policy.sequence_packing.enabled", "policy.dynamic_batching.enabled"
    off = [f"{packing}=false", f"{dynamic}=false"]
    with pytest.raises(UserError, match="train_global_batch_size=4 is not a multiple of"):
        load_recipe(RECIPES / f"{name}.yaml", [*small, *off])
    assert (
        load_recipe(RECIPES / f"{name}.yaml", [*small, *off, f"{by_tokens}=true"]).num_updates_per_step == 32
    )


def test_cluster_recipe_that_saves_nothing_is_noted():
    saves, saves_nothing = (
        load_recipe("cluster-quickstart", [f"checkpointing.enabled={value}"]) for value in ("true", "false")
    )
    assert not [sentence for sentence in advice(saves) if "nothing is saved" in sentence]
    [note] = [sentence for sentence in advice(saves_nothing) if "nothing is saved" in sentence]
    assert "a job that reaches its time limit loses everything" in note
