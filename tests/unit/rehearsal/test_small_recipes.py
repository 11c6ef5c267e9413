"""Every shipped cluster recipe can be made small, and is then a recipe that no rule refuses."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import nemo_grpo.plan.rules  # noqa: F401  # registers the rules of Scope.SHAPE
from nemo_grpo.models import read_spec
from nemo_grpo.plan.inputs import plan_input
from nemo_grpo.recipe import load_recipe
from nemo_grpo.recipe.keys import is_known
from nemo_grpo.recipe.loader import load_tree, merge
from nemo_grpo.recipe.registry import Scope, messages
from nemo_grpo.rehearsal import overrides as small
from nemo_grpo.rehearsal.environment import Stack, stack_for
from nemo_grpo.rehearsal.model import RehearsalModel
from nemo_grpo.rehearsal.replacements import CPU, OF_THE_FULL_MODEL, REHEARSAL
from nemo_grpo.rehearsal.small_config import small_config
from nemo_grpo.rehearsal.tiny_data import problems_of
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError

RECIPES = Path(__file__).parents[3] / "recipes"
CLUSTER = sorted(
    path for folder in ("cw_grpo", "erpo", "gpg", "tr_grpo") for path in (RECIPES / folder).glob("*.yaml")
)
CW_GRPO = RECIPES / "cw_grpo" / "cw_grpo-r1-distill-qwen-1.5b-1n8g.yaml"
EP8 = "policy.megatron_cfg.expert_model_parallel_size=8"
WITH_VLLM = Stack(Path("python"), Path("RL"), Path("vllm"))
MODEL = RehearsalModel(
    Path("/models/small"), "made here", "qwen2", longest_prompt=100, longest_response=12, vocab_size=352
)


def made_small(path, folder, *overrides, max_ranks=4):
    recipe = load_recipe(path, overrides)
    task = problems_of(recipe, folder / "problems").task
    layout = small.rehearsed_ranks(recipe, max_ranks)
    changed = list(small.overrides_of(recipe, task, MODEL, layout, folder / "runs", uses_vllm=True))
    small.write_recipe(folder / "recipe.yaml", recipe, changed)
    return recipe, load_recipe(folder / "recipe.yaml"), layout, changed


@pytest.mark.parametrize("path", CLUSTER, ids=[path.stem for path in CLUSTER])
def test_a_shipped_recipe_stays_one_when_made_small(path, tmp_path):
    recipe, rehearsed, layout, changed = made_small(path, tmp_path)
    for key in (
        *("loss_fn.variant", "nemo_grpo.rewards", "nemo_grpo.prompt", "grpo.use_dynamic_sampling"),
        "policy.sequence_packing.enabled",
    ):
        assert value_of(rehearsed, key) == value_of(recipe, key)
    keys = [change.key for change in changed]
    assert len(keys) == len(set(keys)), "no change depends on the order of others"
    assert rehearsed.world_size == layout.number <= 4
    assert rehearsed.num_updates_per_step == min(recipe.num_updates_per_step, 2)
    fp8 = rehearsed.policy.megatron_cfg.fp8_cfg
    assert fp8 is None or not fp8.enabled
    if "fp8" in path.stem:
        assert any("FP8" in change.reason for change in changed), "what is left out is said"


@pytest.mark.parametrize(("clip", "kept"), [({}, 0.28), ({"ratio_clip_max": 0.2}, 0.2)])
def test_a_rehearsal_keeps_the_clip_of_whoever_wrote_it(clip, kept, tmp_path):
    path, written = tmp_path / "mine.yaml", tmp_path / "written.yaml"
    stock = {
        "data": {"train": {"dataset_name": "gsm8k"}, "default": {"env_name": "math"}},
        "env": {"math": {"num_workers": 8}},
        "loss_fn": {"_override_": True, "ratio_clip_min": 0.2, "ratio_clip_max": 0.2},
        "nemo_grpo": {"_override_": True},
        "checkpointing": {"checkpoint_dir": "results/mine"},
        "logger": {"_override_": True, "log_dir": "logs"},
    }
    (tmp_path / "stock.yaml").write_text(yaml.safe_dump(merge(load_tree(CW_GRPO), stock)))
    path.write_text(yaml.safe_dump({"defaults": "stock.yaml", "loss_fn": {"variant": "dapo", **clip}}))
    small.write_recipe(written, load_recipe(path), [])
    assert load_recipe(written).loss_fn == load_recipe(path).loss_fn
    assert load_recipe(written).loss_fn.ratio_clip_max == kept


@pytest.mark.parametrize(
    ("layout", "ranks", "expected"),
    [
        ((8, 4, 1, 2, 1), 4, (2, 2, 1, 1, 1)),
        ((2, 1, 2, 8, 8), 4, (2, 1, 2, 1, 2)),
        ((1, 1, 1, 8, 1), 4, (1, 1, 1, 2, 1)),
        ((2, 1, 1, 4, 1), 4, (2, 1, 1, 2, 1)),
        ((2, 1, 1, 4, 1), 2, (2, 1, 1, 1, 1)),
        ((1, 1, 1, 1, 1), 1, (1, 1, 1, 1, 1)),
    ],
)
def test_every_parallel_dimension_stays_as_far_as_the_ranks_go(layout, ranks, expected):
    assert small.reduced_ranks(small.Ranks(*layout), ranks) == small.Ranks(*expected)


@pytest.mark.parametrize(
    ("key", "value", "small_value", "reason"),
    [
        # vLLM refuses what is not in its vocabulary, and NeMo-RL goes on with empty responses
        ("policy.generation.stop_token_ids", [128009], None, "they are of the full model's tokenizer"),
        ("policy.generation.bad_words", ["<image>"], None, "they are of the full model's tokenizer"),
        # NeMo-RL's sampling then ends in an index that is out of bounds
        ("policy.generation.top_k", 10000, 352, "the small model has 352 tokens"),
        ("policy.generation.top_k", 50, 50, ""),
        ("policy.hf_config_overrides", {"max_position_embeddings": 16384}, {}, "they are of the full model"),
        # each worker allocates it, which exhausts a machine's memory
        ("policy.refit_buffer_size_gb", 8, 1, "it holds the full model's weights"),
        ("policy.megatron_cfg.mtp_num_layers", 2, 0, "the small model has no such layers"),
        ("policy.megatron_cfg.moe_router_num_groups", 8, None, "the small model has 4 experts"),
    ],
)
def test_numbers_of_the_full_model_are_limited_to_the_small_one(key, value, small_value, reason, tmp_path):
    recipe, rehearsed, _, changed = made_small(CW_GRPO, tmp_path, f"++{key}={json.dumps(value)}")
    assert value_of(recipe, key) == value
    assert value_of(rehearsed, key) == small_value
    assert [change.reason for change in changed if change.key == key] == ([reason] if reason else [])


def test_an_embedded_recipe_is_refused():
    path = RECIPES / "quickstart.yaml"
    with pytest.raises(UserError, match="use nemo-grpo train"):
        stack_for(load_recipe(path), path, WITH_VLLM)


def test_images_need_torchvision():
    path = RECIPES / "gpg/gpg-qwen2.5-vl-3b-lisa-1n8g.yaml"
    with pytest.raises(UserError, match="images are processed by torchvision"):
        stack_for(load_recipe(path), path, WITH_VLLM)
    stack = replace(WITH_VLLM, torchvision=Path("torchvision"))
    assert stack_for(load_recipe(path), path, stack) == replace(stack, sees_images=True)
    assert stack_for(load_recipe(CW_GRPO), CW_GRPO, stack) == stack


@pytest.mark.parametrize(
    ("model", "overrides", "family", "why"),
    [
        ("Qwen/Qwen3-30B-A3B", (), "qwen3_moe", ""),
        ("moonshotai/Moonlight-16B-A3B", (), "qwen3_moe", "because the layers of deepseek_v3 are not"),
        ("openai/gpt-oss-20b", (), "qwen3_moe", "because the layers of gpt_oss are not computed on a CPU"),
        ("see/the-guide", (), "qwen2", "in place of see/the-guide, which is not known here"),
        ("see/the-guide", (EP8,), "qwen3_moe", "in place of see/the-guide, which is not known here"),
    ],
)
def test_a_family_that_is_not_computed_here_has_a_stand_in_and_the_report_says_so(
    model, overrides, family, why
):
    recipe = load_recipe(CW_GRPO, [f"policy.model_name={model}", *overrides])
    stack_for(recipe, CW_GRPO, WITH_VLLM)
    tokenizer = SimpleNamespace(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    config, origin = small_config(recipe, 64, tokenizer)
    assert config.model_type == family
    assert origin.startswith(f"{family} of ")
    assert why in origin
    assert ("in place of" in origin) == bool(why)


CONTROLLED = (
    *("++data_plane.enabled=true", "++async_rl.max_buffered_rollouts=512", "checkpointing.metric_name=null"),
    *("policy.generation.vllm_cfg.async_engine=true", "grpo.val_period=0", "grpo.val_at_start=false"),
    "grpo.val_at_end=false",
    "++policy.generation.colocated={enabled: false, resources: {gpus_per_node: 4, num_nodes: 1}}",
)


@pytest.mark.parametrize(("groups", "chunk"), [(3, 1), (12, small.NUM_PROMPTS)])
def test_a_single_controller_keeps_its_chunks(groups, chunk, tmp_path):
    """As small as they come where there are any; else a step is one."""
    streaming = f"++async_rl.min_groups_for_streaming_train={groups}"
    recipe, rehearsed, _, _ = made_small(CW_GRPO, tmp_path, *CONTROLLED, streaming)
    assert (groups < recipe.grpo.num_prompts_per_step) == (chunk < rehearsed.grpo.num_prompts_per_step)
    assert rehearsed.async_rl.min_groups_for_streaming_train == chunk


def test_asynchronous_rollouts_of_another_sampler_become_vllms(tmp_path):
    """NeMo-RL asks for vLLM's asynchronous engine there, which the recipe has no reason to set."""
    overrides = (
        *("++grpo.async_grpo.enabled=true", "policy.generation.backend=trtllm"),
        "loss_fn.use_importance_sampling_correction=true",
        "++policy.generation.colocated={enabled: false, resources: {gpus_per_node: 4, num_nodes: 1}}",
    )
    recipe, rehearsed, _, _ = made_small(CW_GRPO, tmp_path, *overrides)
    assert not recipe.policy.generation.vllm_cfg.async_engine
    assert rehearsed.policy.generation.vllm_cfg.async_engine
    for asynchronous in (recipe, rehearsed):
        stack_for(asynchronous, CW_GRPO, WITH_VLLM)
        with pytest.raises(UserError, match="run make venv-vllm and leave --sampler out"):
            stack_for(asynchronous, CW_GRPO, replace(WITH_VLLM, vllm_python=None))


REPLACED = {
    "policy.router_replay.enabled": "true",
    "policy.quant_cfg": "FP8_DEFAULT_CFG",
    "policy.generation.quant_cfg": "FP8_DEFAULT_CFG",
    "policy.generation.backend": "sglang",
    "policy.generation.real_quant": "true",
    "policy.generation.vllm_cfg.is_mx": "true",
    "policy.generation.vllm_cfg.use_deep_gemm": "true",
    "policy.generation.vllm_cfg.precision": "float16",
    "policy.generation.vllm_cfg.tensor_parallel_size": "2",
    "policy.megatron_cfg.model_overrides.first_last_layers_bf16": "true",
    "policy.megatron_cfg.moe_token_dispatcher_type": "flex",
    "policy.megatron_cfg.moe_enable_deepep": "true",
    "policy.megatron_cfg.moe_shared_expert_overlap": "true",
    "policy.megatron_cfg.moe_grouped_gemm": "true",
    "policy.megatron_cfg.gradient_accumulation_fusion": "true",
    "checkpointing.enabled": "false",
    "cluster.segment_size": "8",
    "policy.generation.refit_transport": "nixl",
    "policy.draft.enabled": "true",
    "policy.generation.stop_token_ids": "[7]",
    "policy.generation.bad_words": "[word]",
    "policy.refit_buffer_size_gb": "4",
    "policy.megatron_cfg.moe_router_num_groups": "2",
    "policy.megatron_cfg.moe_router_group_topk": "2",
    "policy.hf_config_overrides": "{rope_theta: 10000}",
    "policy.megatron_cfg.mtp_num_layers": "1",
    "logger.wandb_enabled": "true",
    "logger.mlflow_enabled": "true",
    "logger.swanlab_enabled": "true",
}
"""Key of a replacement -> a value that cannot stay and that needs no other key."""
REPLACED_TOGETHER = (
    {
        "policy.generation.vllm_cfg.kv_cache_dtype": "fp8",
        "policy.generation.vllm_cfg.precision": "fp8",
        "policy.megatron_cfg.fp8_cfg.enabled": "true",
        "policy.megatron_cfg.fp8_cfg.fp8_recipe": "tensorwise",
        "loss_fn.use_importance_sampling_correction": "true",
    },
    {
        "policy.generation.vllm_cfg.expert_parallel_size": "2",
        "policy.generation.vllm_cfg.pipeline_parallel_size": "2",
        "policy.generation.vllm_cfg.async_engine": "true",
    },
    {
        "policy.megatron_cfg.optimizer.optimizer_cpu_offload": "true",
        "policy.megatron_cfg.optimizer.optimizer_offload_fraction": "1.0",
    },
    {"grpo.stop_at_validation_metric": "accuracy", "grpo.stop_at_validation_threshold": "0.5"},
    {
        "policy.megatron_cfg.num_layers_in_first_pipeline_stage": "4",
        "policy.megatron_cfg.num_layers_in_last_pipeline_stage": "4",
    },
    {"policy.generation.vllm_kwargs.speculative_config": "{method: ngram}"},
    {
        "policy.model_name": "Qwen/Qwen3-30B-A3B",
        "policy.megatron_cfg.tensor_model_parallel_size": "2",
        "policy.megatron_cfg.expert_tensor_parallel_size": "2",
    },
)
"""As `REPLACED`, for keys that need each other."""
DATA_OF_NEMO_RL = {
    "data.train": "{dataset_name: gsm8k, env_name: math}",
    "env.math.num_workers": "1",
    "data.use_multiple_dataloader": "true",
}
REPLACEMENTS = CPU | REHEARSAL | OF_THE_FULL_MODEL


@pytest.mark.parametrize(
    "settings", [*({key: value} for key, value in REPLACED.items()), *REPLACED_TOGETHER, DATA_OF_NEMO_RL]
)
def test_value_that_cannot_stay_is_replaced_with_its_reason(settings):
    own_data = ["~nemo_grpo.task", "~nemo_grpo.prompt", "~nemo_grpo.rewards"]
    removed = own_data if settings is DATA_OF_NEMO_RL else []
    recipe = load_recipe(CW_GRPO, [*removed, *(f"++{key}={value}" for key, value in settings.items())])
    expected = {key: REPLACEMENTS[key] for key in settings if key in REPLACEMENTS}
    assert expected, "a key whose replacement is gone proves nothing"
    changed = {change.key: change for change in small.replaced(recipe, REPLACEMENTS)}
    assert changed.keys() == expected.keys()
    for key, replacement in expected.items():
        assert (changed[key].value, changed[key].reason) == replacement


def test_values_that_may_stay_are_not_replaced():
    assert list(small.replaced(load_recipe(CW_GRPO), REPLACEMENTS)) == []


def test_every_replacement_is_tested():
    tested = set(REPLACED).union(*REPLACED_TOGETHER, DATA_OF_NEMO_RL)
    assert set(REPLACEMENTS) - tested == set()
    assert [key for key in REPLACEMENTS if not is_known(key)] == []


def test_a_node_with_a_gpu_for_rollouts_is_no_layout_that_a_rule_refuses(tmp_path):
    """TP 2 divides the 4 GPUs that train, beside the one that samples."""
    separate = "++policy.generation.colocated={enabled: false, resources: {gpus_per_node: 8, num_nodes: 1}}"
    tp4 = ("policy.megatron_cfg.tensor_model_parallel_size=4", "cluster.num_nodes=2")
    recipe, rehearsed, layout, _ = made_small(CW_GRPO, tmp_path, separate, *tp4)
    assert layout == small.Ranks(2, 1, 1, 2, 1)
    assert rehearsed.cluster.gpus_per_node == 5
    tokenizer = SimpleNamespace(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    config, _ = small_config(recipe, 352, tokenizer)
    setup = plan_input(rehearsed)
    assert messages(Scope.SHAPE, read_spec(config.to_dict(), "small"), setup) == []
    three_train = replace(setup, num_rollout_gpus=2)
    (message,) = messages(Scope.SHAPE, read_spec(config.to_dict(), "small"), three_train)
    assert "size=2 does not divide the 3 GPUs of a node that train" in message


@pytest.mark.parametrize("window", [128, 4096])
def test_a_small_model_has_no_window_and_rotary_factors_of_its_own_heads(window, tmp_path):
    """Sequences of a rehearsal are shorter than a window, which a CPU's layers do not compute."""
    given = {
        **{"model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
        **{"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "head_dim": 128},
        **{"max_position_embeddings": 32768, "sliding_window": window, "rope_theta": 10000.0},
        "rope_scaling": {
            **{"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 16384},
            **{"short_factor": [1.0] * 64, "long_factor": [2.0] * 64},
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(given))
    recipe = load_recipe(CW_GRPO, [f"policy.model_name={tmp_path}"])
    tokenizer = SimpleNamespace(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    config, _ = small_config(recipe, 352, tokenizer)
    assert config.sliding_window is None
    assert len(config.rope_parameters["long_factor"]) == len(config.rope_parameters["short_factor"]) == 16


def test_scoring_in_chunks_stays_what_it_was_when_megatron_core_replaces_dtensor(tmp_path):
    """A rule refuses Megatron-core's chunks of logits that are in FP32 as a whole."""
    dtensor = (
        *("policy.megatron_cfg.enabled=false", "++policy.dtensor_cfg.enabled=true"),
        *("++policy.logprob_chunk_size=1024", "++policy.megatron_cfg.defer_fp32_logits=false"),
    )
    _, rehearsed, _, _ = made_small(CW_GRPO, tmp_path, *dtensor)
    assert rehearsed.policy.logprob_chunk_size == 1024
    assert rehearsed.policy.megatron_cfg.defer_fp32_logits


@pytest.mark.parametrize(
    ("model", "ep"), [("Qwen/Qwen3-30B-A3B", 2), ("openai/gpt-oss-20b", 2), ("Qwen/Qwen2.5-7B", 1)]
)
def test_a_model_without_experts_has_no_expert_parallelism(model, ep):
    """A vision model with experts is rehearsed with a dense one, which a rule would refuse to split."""
    recipe = load_recipe(CW_GRPO, [f"policy.model_name={model}", EP8])
    assert small.rehearsed_ranks(recipe, 4).ep == ep


def test_a_data_plane_that_is_not_in_the_stack_becomes_the_simple_one(tmp_path):
    plane = "++data_plane={enabled: true, backend: mooncake_cpu}"
    _, rehearsed, _, changed = made_small(CW_GRPO, tmp_path, plane, "loss_fn.reference_policy_kl_penalty=0")
    assert value_of(rehearsed, "data_plane.backend") == "simple"
    assert "mooncake is not in this stack" in [change.reason for change in changed]


@pytest.mark.parametrize(("saves", "save_format"), [(False, None), (True, "safetensors")])
def test_a_recipe_that_never_saves_has_no_save_format_of_dtensor(saves, save_format, tmp_path):
    """A rehearsal saves, and NeMo-RL would refuse the format of its base; a recipe that saves keeps it."""
    dtensor = (
        *("policy.megatron_cfg.enabled=false", "++policy.dtensor_cfg={enabled: true, _v2: false}"),
        *(f"checkpointing.enabled={str(saves).lower()}", "++checkpointing.model_save_format=safetensors"),
    )
    _, rehearsed, _, _ = made_small(CW_GRPO, tmp_path, *dtensor)
    assert value_of(rehearsed, "checkpointing.model_save_format") == save_format
