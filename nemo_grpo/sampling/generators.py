"""Choice of a model's sampler on this machine: the engine's decoder where it can, else transformers."""

import logging
from pathlib import Path
from typing import Literal, get_args

import torch
from transformers import PretrainedConfig

from nemo_grpo.sampling.decoder.weights import missing_weights, unsupported
from nemo_grpo.sampling.generate_decoder import DecoderGenerator
from nemo_grpo.sampling.local_generator import LocalGenerator
from nemo_grpo.support.errors import UserError, first_line
from nemo_grpo.support.hf_folder import load_config, weight_names

log = logging.getLogger(__name__)

LocalName = Literal["auto", "decoder", "hf"]


def choose(wanted: str, model: Path | PretrainedConfig) -> Literal["decoder", "hf"]:
    """The generator for this model; ``auto``: decoder where it can, and the log says why where it cannot.

    Raises: UserError: the decoder is asked for and cannot.
    """
    if wanted == "hf":
        return "hf"
    reason = _reason_against_decoder(model)
    if reason is None:
        return "decoder"
    if wanted == "decoder":
        raise UserError(f"generator=decoder cannot sample from this model: {reason}; use auto or hf")
    log.info("sampling with transformers (generator hf), the decoder does not take this model: %s", reason)
    return "hf"


def _reason_against_decoder(model: Path | PretrainedConfig) -> str | None:
    if isinstance(model, PretrainedConfig):
        return unsupported(model)
    try:
        config = load_config(model)
    except (OSError, ValueError) as error:  # transformers' own loading says what is wrong with the folder
        return first_line(error)
    missing = unsupported(config) is None and missing_weights(config, weight_names(model))
    return f"the folder has no {missing[0]} in a safetensors file" if missing else unsupported(config)


def build_local(
    wanted: str,
    model: Path | PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_batch_size: int,
) -> LocalGenerator:
    """The chosen generator, with the folder's weights; with a configuration alone, without any yet.

    Args:   wanted: a `LocalName`.
    Raises: UserError: see `choose`; or the folder holds no whole model.
    """
    assert wanted in get_args(LocalName), wanted
    if choose(wanted, model) == "decoder":
        return DecoderGenerator(model, dtype, device, max_batch_size)
    from nemo_grpo.sampling.generate_hf import HFGenerator  # transformers' models take seconds to load

    return HFGenerator(model, dtype, device, max_batch_size)
