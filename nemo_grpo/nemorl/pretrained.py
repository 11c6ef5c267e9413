"""The Hugging Face model that a run starts from: its configuration, and its tokenizer or processor."""

from typing import Any

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.nemorl.nemo_rl_batches import configure_gym, fix_video_frames
from nemo_grpo.nemorl.workarounds.random_image_weights import load_image_weights
from nemo_grpo.recipe.policy_sections import stop_refusals
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError, first_line


def model_config(run: ClusterRun) -> Any:
    """Read transformers' configuration of the model, and check its code and the tokens that end responses."""
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    name, trusted = run.recipe.policy.model_name or "", run.recipe.nemo_grpo.trust_remote_code
    tokenizer = run.recipe.policy.tokenizer.name or name
    try:
        declared, _ = PretrainedConfig.get_config_dict(name)
        refused = not trusted and "auto_map" in {*declared, *get_tokenizer_config(tokenizer)}
        config = None
        if not refused:
            overrides = run.recipe.policy.hf_config_overrides  # as NeMo-RL's workers and vLLM apply them
            config = AutoConfig.from_pretrained(name, trust_remote_code=trusted, **overrides)
    except (OSError, ValueError) as error:
        raise UserError(
            f"policy.model_name={name} has no config.json that transformers can read ({first_line(error)}); "
            "give a Hugging Face folder, or a name in this node's cache"
        ) from error
    if config is None:
        raise UserError(
            f"policy.model_name={name} brings Python code (auto_map), and NeMo-RL runs whatever a model "
            "brings; read it and set nemo_grpo.trust_remote_code=true, or take another model"
        )
    ends = run.recipe.policy.generation.stop_token_ids or ()
    if errors := list(stop_refusals(ends, config.get_text_config().vocab_size, name)):
        raise UserError("; ".join(errors))
    return config


def load_tokenizer(run: ClusterRun) -> tuple[Any, Any]:
    """Load (processor or None, tokenizer); also complete the generation settings that depend on it."""
    config, with_gym = run.master_config, run.recipe.env.should_use_nemo_gym
    policy = config.policy
    if with_gym:
        fix_video_frames(config)
    get_tokenizer = compat.import_name("nemo_rl.algorithms.utils:get_tokenizer")
    processor = get_tokenizer(policy["tokenizer"], get_processor=True) if run.has_images else None
    tokenizer = get_tokenizer(policy["tokenizer"]) if processor is None else processor.tokenizer
    if "generation" not in policy:  # supervised training
        return processor, tokenizer
    policy["generation"] = compat.import_name("nemo_rl.models.generation:configure_generation_config")(
        policy["generation"],
        tokenizer,
        has_refit_draft_weights=bool(value_of(policy, "draft.enabled", False)),
        trains_mtp=bool(value_of(policy, "megatron_cfg.mtp_num_layers", 0)),
    )
    if run.has_images and run.recipe.policy.generation.backend == "vllm":
        load_image_weights(policy["generation"])
    if with_gym:
        configure_gym(config, tokenizer)
    return processor, tokenizer
