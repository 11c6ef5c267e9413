"""NeMo-RL's keys, read from its source."""

from scripts.record_nemo_rl_keys import Source

GRPO = """
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict, Union

Backend = Literal["vllm", "sglang"]


class LossConfig(TypedDict):
    clip: float


class Off(TypedDict):
    enabled: Literal[False]


class On(TypedDict):
    enabled: Literal[True]
    size: int  # Tokens of a row. They are padded.


class PolicyConfig(TypedDict):
    model_name: str
    backend: Backend
    name: Literal["a", "b"] | str
    packing: NotRequired[Union[Off, On]]
    # Default: False
    is_async: NotRequired[bool]
    extra: dict[str, Any]
    anything: Any
    _private: int


class GRPOConfig(BaseModel, extra="allow"):
    # Pairs of numbers
    # for each step.
    pairs: list[tuple[int, int]] | None = None
    limit: Annotated[PositiveInt, Field(gt=0)] = Field(default=3)
    \"\"\"Largest number.\"\"\"
    rate: "Optional[float]" = None


class MasterConfig(BaseModel):
    policy: PolicyConfig
    loss_fn: LossConfig
    grpo: GRPOConfig
"""
RECIPE = """
grpo: {rate: 1, limit: null, of_a_recipe: 2, unread_word: true, referring: "${grpo.rate}"}
policy: {extra: {a: 1}, backend: megatron}
"""


def test_types_values_defaults_and_documentation_are_read(tmp_path):
    (tmp_path / "nemo_rl" / "algorithms").mkdir(parents=True)
    (tmp_path / "examples").mkdir()
    (tmp_path / "nemo_rl" / "algorithms" / "grpo.py").write_text(GRPO)
    (tmp_path / "nemo_rl" / "other.py").write_text("config['of_a_recipe'], config['referring']")
    (tmp_path / "examples" / "recipe.yaml").write_text(RECIPE)
    assert Source(tmp_path).entries() == {
        "env": {"types": ["dict"], "free": True},
        "grpo": {"types": ["section"]},
        "grpo.limit": {"doc": "Largest number", "types": ["int", "null"], "default": 3},
        "grpo.of_a_recipe": {"types": ["float", "null"]},
        "grpo.pairs": {"doc": "Pairs of numbers for each step", "types": ["list", "null"], "default": None},
        "grpo.rate": {"types": ["float", "null"], "default": None},
        "grpo.referring": {},
        "grpo.unread_word": {"types": ["bool", "null"], "unread": True},
        "policy": {"types": ["section"]},
        "policy.anything": {"free": True},
        "policy.backend": {"types": ["str"]},
        "policy.extra": {"types": ["dict"], "free": True},
        "policy.is_async": {"types": ["bool"], "default": False},
        "policy.model_name": {"types": ["str"]},
        "policy.name": {"types": ["str"]},
        "policy.packing": {"types": ["section"]},
        "policy.packing.enabled": {"types": ["bool"]},
        "policy.packing.size": {"doc": "Tokens of a row", "types": ["int"]},
    }
