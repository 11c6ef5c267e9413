"""The Hugging Face model that a run starts from: configuration, tokenizer or processor, Megatron conversion.

NeMo-RL converts a model to Megatron once, into a folder that its jobs share, and takes ``iter_0000000`` for a
finished conversion. A killed one lacks ``run_config.yaml``, which is written last: every later start would
skip the conversion and fail with "Pretrained run config not found". `remove_remains` removes such a folder.
"""

import glob
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_grpo.nemorl import compat
from nemo_grpo.nemorl.config import ClusterRun
from nemo_grpo.nemorl.nemo_rl_batches import configure_gym, fix_video_frames
from nemo_grpo.recipe.policy_sections import stop_refusals
from nemo_grpo.support.dotted import value_of
from nemo_grpo.support.errors import UserError, first_line

log = logging.getLogger(__name__)

LOADED = "auto"
"""vLLM's load format with images. NeMo-RL's default starts an engine with random weights, and a refit sends
only what Megatron-Bridge exports: other tensors, such as vLLM 0.32's image normalisation, would stay random
(NeMo-RL's pull request 3904)."""
ITERATION, LAST_FILE = "iter_0000000", "run_config.yaml"
STILL_S = 600.0
"""Seconds without a write after which an incomplete folder's job is taken for dead."""
POLL_S = 30.0


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
        policy["generation"]["vllm_cfg"]["load_format"] = LOADED
    if with_gym:
        configure_gym(config, tokenizer)
    return processor, tokenizer


def conversions(policy: Any) -> list[Path]:
    """List folders of this model's conversions, with any ``hf_config_overrides``, as NeMo-RL computes them.

    Args:    policy: section of NeMo-RL's configuration.
    Returns: existing folders; none if NeMo-RL converts nothing.
    """
    if value_of(policy, "pretrained_checkpoint") or value_of(policy, "megatron_cfg.force_reconvert_from_hf"):
        return []
    name = policy["model_name"]
    if os.path.exists(name):
        name = f"model_{name.replace('/', '_')}"
    root = os.path.join(compat.import_name("nemo_rl.models.policy.utils:get_megatron_checkpoint_dir")(), name)
    overridden = glob.glob(f"{glob.escape(root)}__hfovr_*")
    return [Path(folder) / ITERATION for folder in (root, *sorted(overridden))]


def remove_remains(
    policy: Any, clock: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Remove incomplete conversions, so that NeMo-RL converts again.

    Another job may be converting right now, so a folder is removed only after `STILL_S` without a write; if
    it becomes complete before, it stays. It is moved before it is deleted, so that no job sees a partial
    folder. Not covered: folders on other nodes, if NRL_MEGATRON_CHECKPOINT_DIR is not shared.
    """
    for folder in conversions(policy):
        while folder.is_dir() and not (folder / LAST_FILE).exists():
            still = clock() - last_written(folder)
            if still >= STILL_S:
                _remove(folder)
                break
            log.warning(
                "%s is incomplete; last write %.0f s ago: waiting for the job that converts it; removed "
                "after %.0f s without a write",
                *(folder, still, STILL_S),
            )
            sleep(min(POLL_S, STILL_S - still))


def last_written(folder: Path) -> float:
    """Find the time of the newest change within a folder, in seconds since the epoch."""
    times = []
    for path in (folder, *folder.rglob("*")):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # a temporary file was renamed
            continue
    return max(times, default=0.0)


def _remove(folder: Path) -> None:
    log.warning("removing %s: a killed conversion left it without %s", folder, LAST_FILE)
    away = folder.with_name(f".{ITERATION}-incomplete-{os.getpid()}")
    try:
        folder.rename(away)
    except FileNotFoundError:  # another job was first
        return
    except OSError as error:
        raise UserError(
            f"{folder} is left from a killed conversion, NeMo-RL would fail on it, and it cannot be moved "
            f"({error.strerror}); remove it, or set NRL_MEGATRON_CHECKPOINT_DIR to a folder of your own"
        ) from None
    shutil.rmtree(away, ignore_errors=True)
