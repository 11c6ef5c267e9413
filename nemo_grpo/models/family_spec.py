"""Declaration of a model family, and the reader of its config.json."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nemo_grpo.models.config_validation import MAX_TENSORS, checked
from nemo_grpo.models.shared_mappings import Entry, decoder_table
from nemo_grpo.models.spec import ModelSpec
from nemo_grpo.support.errors import UserError

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SCALED = ("llama3", "yarn", "longrope")
DEFAULT_WINDOW = 4096
"""Positions of a window where config.json has no ``sliding_window``, of every family but gpt-oss."""
SLIDING = "sliding_attention"
"""Kind of a layer with a window, in ``layer_types``."""


def rotary(text: Mapping[str, Any]) -> dict[str, Any]:
    """Read rotary parameters as transformers does: a ``rope_scaling`` replaces all ``rope_parameters``.

    Args:    text: the decoder's part of config.json.
    Returns: ``rope_type`` and ``rope_theta`` always.
    """
    found = text.get("rope_scaling") or text.get("rope_parameters") or {}
    found = dict(found.get("full_attention", found))  # some configs have two, by kind of layer
    kind = found.get("rope_type", found.get("type", "default"))
    found["rope_type"] = "default" if kind == "mrope" else kind  # newer configs have mrope_section alone
    found["rope_theta"] = float(found.get("rope_theta") or text.get("rope_theta", 10000.0))
    if "partial_rotary_factor" in text:
        found.setdefault("partial_rotary_factor", text["partial_rotary_factor"])
    if kind in _SCALED:
        found.setdefault("original_max_position_embeddings", text.get("max_position_embeddings"))
    return found


def window_if_stated(text: Mapping[str, Any]) -> int | None:
    """Read the window of a family of which nothing else is known."""
    window: int | None = text.get("sliding_window")
    return window if SLIDING in text.get("layer_types", [SLIDING]) else None


def no_window(text: Mapping[str, Any]) -> int | None:
    """Ignore ``sliding_window``, as transformers does for Llama."""
    return None


def window_of_every_layer(text: Mapping[str, Any]) -> int | None:
    """Read Mistral's window, which no other key switches off."""
    window: int | None = text.get("sliding_window", DEFAULT_WINDOW)
    return window


def window_if_used(text: Mapping[str, Any]) -> int | None:
    """Read the window of every layer, which ``use_sliding_window`` switches on (Qwen3-MoE)."""
    return window_of_every_layer(text) if text.get("use_sliding_window") else None


def window_of_later_layers(text: Mapping[str, Any]) -> int | None:
    """Read the window of Qwen2, Qwen3 and Qwen2.5-VL.

    ``layer_types`` names the layers that have it; without them those from ``max_window_layers`` on have it.
    """
    kinds = text.get("layer_types")
    if kinds is None:
        has_window = text["max_window_layers"] < text["num_hidden_layers"]
    else:
        has_window = SLIDING in kinds
    return window_if_used(text) if has_window else None


@dataclass(frozen=True)
class FamilySpec:
    """A model family.

    Attributes:
        architecture, model_type: how its config.json names it.
        has_qkv_bias, has_qk_norm: as in `ModelSpec`; or the key of config.json that sets it.
        fixed: fields of `ModelSpec` that every model of the family has.
        is_computed: the embedded engine and the decoder compute it. False for a family with experts, or with
            settings in its config.json that change the computation and are not in `ModelSpec`.
        defaults: values that transformers takes where config.json does not say.
        expert_width: the key of config.json that has an expert's feed-forward width.
        stacks_layers: a checkpoint stacks the layers of a tensor, as megatron-core does where all layers are
            alike.
        aliases: other prefixes of Hugging Face names that transformers writes -> the table's.
        table: every tensor of a model; None: the family is planned and not converted.
        sizes: config.json -> sizes by the letters of the family's own tensors; KeyError: one is missing.
        vision_parameters: of these sizes, the parameters of the vision tower.
        settings: config.json, its model -> Megatron-Bridge's provider where it is not a dense decoder's.
        rope: the decoder's part of config.json -> rotary parameters of the layers that see everything.
        window: the decoder's part of config.json -> the window of those layers that have one, or None.
        activation: the key of config.json that names the activation.
        unsaid: keys of config.json that change the computation and have no place in run_config.yaml.
        linear_layers, linear_sizes: the decoder's part of config.json -> as in `ModelSpec`.
    """

    architecture: str
    model_type: str
    has_qkv_bias: bool | str = False
    has_qk_norm: bool | str = False
    fixed: Mapping[str, bool] = field(default_factory=dict)
    is_computed: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    expert_width: str = "moe_intermediate_size"
    stacks_layers: bool = True
    aliases: Mapping[str, str] = field(default_factory=dict)
    table: Callable[[ModelSpec], tuple[Entry, ...]] | None = decoder_table
    sizes: Callable[[Mapping[str, Any]], Mapping[str, int]] | None = None
    vision_parameters: Callable[[Mapping[str, int]], int] | None = None
    settings: Callable[[Mapping[str, Any], ModelSpec], dict[str, Any]] | None = None
    rope: Callable[[Mapping[str, Any]], dict[str, Any]] = rotary
    window: Callable[[Mapping[str, Any]], int | None] = window_if_stated
    activation: str = "hidden_act"
    unsaid: tuple[str, ...] = ()
    linear_layers: Callable[[Mapping[str, Any]], tuple[int, ...]] | None = None
    linear_sizes: Callable[[Mapping[str, Any]], tuple[int, int]] | None = None

    def read(self, config: Mapping[str, Any], name: str) -> ModelSpec:
        """Read the model that a config.json describes. Args: name: the model's, for messages."""
        config = checked(config, name)
        text = {**self.defaults, **(config.get("text_config") or config)}
        self._check(text, name)
        with complete(name):
            heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
            groups = int(text.get("num_key_value_heads") or heads)
            experts = int(next((text[key] for key in _NUM_EXPERTS if text.get(key)), 0))
            num_dense = int(text.get("first_k_dense_replace") or 0)
            layers = int(text["num_hidden_layers"])
            _check_counts(name, heads, hidden, groups, layers * max(experts, 1))
            sizes = self.sizes(config) if self.sizes else {}
            return ModelSpec(
                name=name,
                model_type=self.model_type,
                hidden_size=hidden,
                num_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=groups,
                ffn_size=int(text[self.expert_width if experts else "intermediate_size"]),
                vocab_size=int(text["vocab_size"]),
                max_position_embeddings=int(text["max_position_embeddings"]),
                tied_embeddings=bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings")),
                head_dim=int(text.get("qk_nope_head_dim") or text.get("head_dim") or hidden // heads),
                has_qkv_bias=_says(self.has_qkv_bias, text),
                has_qk_norm=_says(self.has_qk_norm, text),
                linear_layers=self.linear_layers(text) if self.linear_layers else (),
                linear_sizes=self.linear_sizes(text) if self.linear_sizes else (0, 0),
                num_experts=experts,
                num_experts_per_token=int(text.get("num_experts_per_tok") or 0) if experts else 0,
                num_shared_experts=_num_shared(text, name),
                has_shared_gate="shared_expert_intermediate_size" in text,
                num_dense_layers=num_dense,
                dense_ffn_size=int(text["intermediate_size"]) if num_dense else 0,
                query_rank=int(text.get("q_lora_rank") or 0),
                key_value_rank=int(text.get("kv_lora_rank") or 0),
                rope_head_dim=int(text.get("qk_rope_head_dim") or 0),
                num_vision_parameters=self.vision_parameters(sizes) if self.vision_parameters else 0,
                norm_eps=float(text.get("rms_norm_eps", 1e-6)),
                hidden_act=text.get(self.activation, "silu"),
                rope=self.rope(text),
                sliding_window=self._window_within(text),
                sizes=sizes,
                **self.fixed,
            )

    def _window_within(self, text: Mapping[str, Any]) -> int | None:
        """Read the window, unless it is as long as the longest text."""
        window = self.window(text)
        return window if window and window < text["max_position_embeddings"] else None

    def _check(self, text: Mapping[str, Any], name: str) -> None:
        for key in {"attention_bias", "mlp_bias"} - {self.has_qkv_bias}:
            if text.get(key):
                raise UserError(
                    f"config.json of {name}: {key}=true is not supported; Megatron has them on all linear "
                    "layers or none"
                )
        dense, every = text.get("mlp_only_layers") or [], text.get("decoder_sparse_step", 1)
        if dense or every != 1:
            raise UserError(
                f"config.json of {name} has mlp_only_layers={dense}, decoder_sparse_step={every}; only "
                "models whose layers all have experts ([] and 1) are supported"
            )


@contextmanager
def complete(name: str) -> Iterator[None]:
    """Turn a `KeyError` within the block into an error that names the key missing in config.json."""
    try:
        yield
    except KeyError as error:
        raise UserError(
            f"config.json of {name} has no {error.args[0]}; is it a language model's config?"
        ) from None


def _num_shared(text: Mapping[str, Any], name: str) -> int:
    """Count shared experts of a routed one's width."""
    width, each = text.get("shared_expert_intermediate_size", 0), text.get("moe_intermediate_size", 1)
    if width % each:
        raise UserError(
            f"config.json of {name}: shared_expert_intermediate_size={width} is no multiple of "
            f"moe_intermediate_size={each}, which is not supported"
        )
    return int(text.get("n_shared_experts", width // each))


def _says(declared: bool | str, text: Mapping[str, Any]) -> bool:
    return bool(text.get(declared)) if isinstance(declared, str) else declared


def _check_counts(name: str, heads: int, hidden: int, groups: int, num_tensors: int) -> None:
    if heads % groups:
        raise UserError(
            f"config.json of {name}: num_attention_heads={heads} is no multiple of "
            f"num_key_value_heads={groups}"
        )
    if heads > hidden:
        raise UserError(
            f"config.json of {name}: num_attention_heads={heads} exceeds hidden_size={hidden}; correct it"
        )
    if num_tensors > MAX_TENSORS:
        raise UserError(
            f"config.json of {name} has {num_tensors} experts in all its layers, and {MAX_TENSORS} is the "
            "limit; correct it"
        )
