"""Declaration of a model family, and the reader of its config.json."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nemo_grpo.models.config_validation import MAX_TENSORS, checked
from nemo_grpo.models.shared_mappings import Entry, decoder_table
from nemo_grpo.models.spec import ModelSpec
from nemo_grpo.support.errors import UserError

_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json that families use for the number of experts."""
_NEED_ORIGINAL_LENGTH = ("llama3", "yarn", "longrope")
"""Kinds of rotary scaling that transformers computes from ``original_max_position_embeddings``."""
DEFAULT_WINDOW = 4096
"""Positions of a window where config.json has no ``sliding_window``, of every family but gpt-oss."""
SLIDING = "sliding_attention"
"""Kind of a layer with a window, in ``layer_types``."""


def rotary(text_config: Mapping[str, Any]) -> dict[str, Any]:
    """Read rotary parameters as transformers does: a ``rope_scaling`` replaces all ``rope_parameters``.

    Args: text_config: the decoder's part of config.json.
    Returns: the parameters by name; ``rope_type`` and ``rope_theta`` are always there.
    """
    section = text_config.get("rope_scaling") or text_config.get("rope_parameters") or {}
    # Some configs have two sections, by kind of layer.
    parameters = dict(section.get("full_attention", section))
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    # Older configs call it "mrope" where newer ones have the key mrope_section and the type "default".
    parameters["rope_type"] = "default" if rope_type == "mrope" else rope_type
    parameters["rope_theta"] = float(parameters.get("rope_theta") or text_config.get("rope_theta", 10000.0))
    if "partial_rotary_factor" in text_config:
        parameters.setdefault("partial_rotary_factor", text_config["partial_rotary_factor"])
    if rope_type in _NEED_ORIGINAL_LENGTH:
        parameters.setdefault("original_max_position_embeddings", text_config.get("max_position_embeddings"))
    return parameters


def window_if_stated(text_config: Mapping[str, Any]) -> int | None:
    """Read ``sliding_window`` in families without rules of their own for it."""
    window: int | None = text_config.get("sliding_window")
    return window if SLIDING in text_config.get("layer_types", [SLIDING]) else None


def no_window(text_config: Mapping[str, Any]) -> int | None:
    """Ignore ``sliding_window``, as transformers does for Llama."""
    return None


def window_of_every_layer(text_config: Mapping[str, Any]) -> int | None:
    """Read Mistral's window, which no other key switches off."""
    window: int | None = text_config.get("sliding_window", DEFAULT_WINDOW)
    return window


def window_if_used(text_config: Mapping[str, Any]) -> int | None:
    """Read the window of every layer, which ``use_sliding_window`` switches on (Qwen3-MoE)."""
    return window_of_every_layer(text_config) if text_config.get("use_sliding_window") else None


def window_of_later_layers(text_config: Mapping[str, Any]) -> int | None:
    """Read the window of Qwen2, Qwen3 and Qwen2.5-VL.

    ``layer_types`` tells which layers have a window. Without that key, these are the layers from number
    ``max_window_layers`` on.
    """
    layer_types = text_config.get("layer_types")
    if layer_types is None:
        has_window = text_config["max_window_layers"] < text_config["num_hidden_layers"]
    else:
        has_window = SLIDING in layer_types
    return window_if_used(text_config) if has_window else None


@dataclass(frozen=True)
class FamilySpec:
    """A model family.

    Attributes:
        architecture: its name in config.json's ``architectures``.
        model_type: its name in config.json's ``model_type``.
        has_qkv_bias: as in `ModelSpec`, or the key of config.json that sets it.
        has_qk_norm: as in `ModelSpec`, or the key of config.json that sets it.
        fixed: fields of `ModelSpec` that every model of the family has.
        is_computed: the embedded engine and the decoder compute it. False for a family with experts, or with
            settings in its config.json that change the computation and are not in `ModelSpec`.
        defaults: values that transformers takes for keys that config.json lacks.
        expert_width: the key of config.json that has an expert's feed-forward width.
        stacks_layers: a checkpoint stacks the layers of a tensor, as megatron-core does if all layers are
            alike.
        aliases: prefixes of Hugging Face names that transformers also writes -> prefixes in the table.
        table: function that lists every tensor of a model; None: the family is planned, but not converted.
        sizes: config.json -> sizes by the letters of the family's own tensors. It may raise KeyError for a
            missing key.
        vision_parameters: result of ``sizes`` -> number of parameters of the vision tower.
        settings: (config.json, `ModelSpec`) -> settings of Megatron-Bridge's provider beyond a dense
            decoder's.
        rope: the decoder's part of config.json -> rotary parameters of the layers without a window.
        window: the decoder's part of config.json -> the window of those layers that have one, or None.
        activation: the key of config.json that names the activation.
        lost_keys: keys of config.json that change the computation and have no place in run_config.yaml.
        linear_layers: the decoder's part of config.json -> `ModelSpec.linear_layers`.
        linear_sizes: the decoder's part of config.json -> `ModelSpec.linear_sizes`.
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
    lost_keys: tuple[str, ...] = ()
    linear_layers: Callable[[Mapping[str, Any]], tuple[int, ...]] | None = None
    linear_sizes: Callable[[Mapping[str, Any]], tuple[int, int]] | None = None

    def read(self, config: Mapping[str, Any], name: str) -> ModelSpec:
        """Read the model that a config.json describes.

        Args:
            config: config.json's content.
            name: the model's name, for messages.
        """
        config = checked(config, name)
        # A model with a vision tower has the decoder's settings in a section of their own.
        text_config = {**self.defaults, **(config.get("text_config") or config)}
        self._refuse_other_layers(text_config, name)
        with complete(name):
            num_heads = int(text_config["num_attention_heads"])
            hidden_size = int(text_config["hidden_size"])
            num_groups = int(text_config.get("num_key_value_heads") or num_heads)
            num_layers = int(text_config["num_hidden_layers"])
            num_experts = _num_experts(text_config)
            num_dense_layers = int(text_config.get("first_k_dense_replace") or 0)
            _check_counts(name, num_heads, hidden_size, num_groups, num_layers * max(num_experts, 1))
            sizes = self.sizes(config) if self.sizes else {}
            return ModelSpec(
                name=name,
                model_type=self.model_type,
                hidden_size=hidden_size,
                num_layers=num_layers,
                num_attention_heads=num_heads,
                num_key_value_heads=num_groups,
                ffn_size=int(text_config[self.expert_width if num_experts else "intermediate_size"]),
                vocab_size=int(text_config["vocab_size"]),
                max_position_embeddings=int(text_config["max_position_embeddings"]),
                tied_embeddings=bool(
                    config.get("tie_word_embeddings") or text_config.get("tie_word_embeddings")
                ),
                head_dim=_head_dim(text_config),
                has_qkv_bias=_is_set(self.has_qkv_bias, text_config),
                has_qk_norm=_is_set(self.has_qk_norm, text_config),
                linear_layers=self.linear_layers(text_config) if self.linear_layers else (),
                linear_sizes=self.linear_sizes(text_config) if self.linear_sizes else (0, 0),
                num_experts=num_experts,
                num_experts_per_token=int(text_config.get("num_experts_per_tok") or 0) if num_experts else 0,
                num_shared_experts=_num_shared_experts(text_config, name),
                has_shared_gate="shared_expert_intermediate_size" in text_config,
                num_dense_layers=num_dense_layers,
                dense_ffn_size=int(text_config["intermediate_size"]) if num_dense_layers else 0,
                query_rank=int(text_config.get("q_lora_rank") or 0),
                key_value_rank=int(text_config.get("kv_lora_rank") or 0),
                rope_head_dim=int(text_config.get("qk_rope_head_dim") or 0),
                num_vision_parameters=self.vision_parameters(sizes) if self.vision_parameters else 0,
                norm_eps=float(text_config.get("rms_norm_eps", 1e-6)),
                hidden_act=text_config.get(self.activation, "silu"),
                rope=self.rope(text_config),
                sliding_window=self._window_within(text_config),
                sizes=sizes,
                **self.fixed,
            )

    def _window_within(self, text_config: Mapping[str, Any]) -> int | None:
        """Read the window; None if it is as long as the longest sequence, and so limits nothing."""
        window = self.window(text_config)
        return window if window and window < text_config["max_position_embeddings"] else None

    def _refuse_other_layers(self, text_config: Mapping[str, Any], name: str) -> None:
        """Refuse biases and dense layers that a config.json has and the family's table lacks."""
        for key in ("attention_bias", "mlp_bias"):
            # A family may read this key itself: then its table has these biases.
            is_read = key == self.has_qkv_bias
            if text_config.get(key) and not is_read:
                raise UserError(
                    f"config.json of {name}: {key}=true is not supported; Megatron has them on all linear "
                    "layers or none"
                )
        dense_layers = text_config.get("mlp_only_layers") or []
        sparse_step = text_config.get("decoder_sparse_step", 1)
        if dense_layers or sparse_step != 1:
            raise UserError(
                f"config.json of {name} has mlp_only_layers={dense_layers}, "
                f"decoder_sparse_step={sparse_step}; only models whose layers all have experts ([] and 1) "
                "are supported"
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


def _num_experts(text_config: Mapping[str, Any]) -> int:
    for key in _NUM_EXPERTS_KEYS:
        if text_config.get(key):
            return int(text_config[key])
    return 0


def _head_dim(text_config: Mapping[str, Any]) -> int:
    """Read the width of a head; in latent attention that of the part without positions."""
    for key in ("qk_nope_head_dim", "head_dim"):
        if text_config.get(key):
            return int(text_config[key])
    return int(text_config["hidden_size"]) // int(text_config["num_attention_heads"])


def _num_shared_experts(text_config: Mapping[str, Any], name: str) -> int:
    """Count the shared experts of a layer.

    If config.json has only their joint width, this is the number of routed experts of the same width.
    """
    shared_width = text_config.get("shared_expert_intermediate_size", 0)
    expert_width = text_config.get("moe_intermediate_size", 1)
    if shared_width % expert_width:
        raise UserError(
            f"config.json of {name}: shared_expert_intermediate_size={shared_width} is no multiple of "
            f"moe_intermediate_size={expert_width}, which is not supported"
        )
    return int(text_config.get("n_shared_experts", shared_width // expert_width))


def _is_set(declared: bool | str, text_config: Mapping[str, Any]) -> bool:
    """Return a property, which a family declares as a boolean or by the key of config.json that sets it."""
    return bool(text_config.get(declared)) if isinstance(declared, str) else declared


def _check_counts(name: str, num_heads: int, hidden_size: int, num_groups: int, num_tensors: int) -> None:
    """Refuse numbers that contradict each other, or that are so large that no table fits into memory."""
    if num_heads % num_groups:
        raise UserError(
            f"config.json of {name}: num_attention_heads={num_heads} is no multiple of "
            f"num_key_value_heads={num_groups}"
        )
    if num_heads > hidden_size:
        raise UserError(
            f"config.json of {name}: num_attention_heads={num_heads} exceeds hidden_size={hidden_size}; "
            "correct it"
        )
    if num_tensors > MAX_TENSORS:
        raise UserError(
            f"config.json of {name} has {num_tensors} experts in all its layers, and {MAX_TENSORS} is the "
            "limit; correct it"
        )
