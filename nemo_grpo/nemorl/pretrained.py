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

    policy = run.recipe.policy
    name = policy.model_name or ""
    is_trusted = run.recipe.nemo_grpo.trust_remote_code
    try:
        # Both read the files without running the model's code.
        config_keys, _ = PretrainedConfig.get_config_dict(name)
        tokenizer_keys = get_tokenizer_config(policy.tokenizer.name or name)
        brings_code = "auto_map" in config_keys or "auto_map" in tokenizer_keys
        config = None
        if is_trusted or not brings_code:
            # The overrides are those that NeMo-RL's workers and vLLM apply.
            overrides = policy.hf_config_overrides
            config = AutoConfig.from_pretrained(name, trust_remote_code=is_trusted, **overrides)
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
    stop_token_ids = policy.generation.stop_token_ids or ()
    vocab_size = config.get_text_config().vocab_size
    errors = list(stop_refusals(stop_token_ids, vocab_size, name))
    if errors:
        raise UserError("; ".join(errors))
    return config


def load_tokenizer(run: ClusterRun) -> tuple[Any, Any]:
    """Load processor (None without images) and tokenizer, and complete the generation settings with them."""
    config = run.master_config
    policy = config.policy
    uses_gym = run.recipe.env.should_use_nemo_gym
    if uses_gym:
        fix_video_frames(config)
    get_tokenizer = compat.import_name("nemo_rl.algorithms.utils:get_tokenizer")
    processor = get_tokenizer(policy["tokenizer"], get_processor=True) if run.has_images else None
    tokenizer = get_tokenizer(policy["tokenizer"]) if processor is None else processor.tokenizer
    is_supervised = "generation" not in policy
    if is_supervised:
        return processor, tokenizer
    configure_generation = compat.import_name("nemo_rl.models.generation:configure_generation_config")
    policy["generation"] = configure_generation(
        policy["generation"],
        tokenizer,
        has_refit_draft_weights=bool(value_of(policy, "draft.enabled", False)),
        trains_mtp=bool(value_of(policy, "megatron_cfg.mtp_num_layers", 0)),
    )
    if run.has_images and run.recipe.policy.generation.backend == "vllm":
        load_image_weights(policy["generation"])
    if uses_gym:
        configure_gym(config, tokenizer)
    return processor, tokenizer
