"""How papers evaluate: samples, sampling, length and prompt by name, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_grpo.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Protocol:
    """Attributes:
    source: where the values stand.
    k: samples per problem.  temperature: 0 is greedy.  max_tokens: at most what the model's positions
        leave behind the longest prompt.
    prompts: benchmark or task -> preset, where no recipe sets the prompt.
    """

    source: str
    k: int
    temperature: float
    top_p: float
    max_tokens: int
    prompts: Mapping[str, str] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """The options of ``nemo-grpo eval`` that it stands for."""
        return {
            "k": self.k,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
        }


PROTOCOLS: dict[str, Protocol] = {
    "cw_grpo": Protocol(
        "the release's README (WangCheng0116/CW-GRPO); its model length at 7B is 4096",
        *(1, 0.6, 0.95, 32768),
        prompts={"math": "lighteval"},
    ),
    "erpo": Protocol("ERPO A.3, where Minerva is minerva-40", 16, 1.0, 0.95, 2048),
    "tr_grpo": Protocol(
        "TR-GRPO section 4.1: greedy for OlympiadBench, Minerva, MATH-500, avg@16 and pass@16 for AMC, AIME; "
        "temperature and length of training (Table 6), as it states none",
        *(16, 1.0, 1.0, 4096),
        prompts={"math": "tr_grpo_math"},
    ),
    "gpg": Protocol(
        "the release's open-rs/eval.sh (AMAP-ML/GPG), for its 1.5B models",
        *(1, 0.6, 0.95, 32768),
        prompts={"math": "lighteval"},
    ),
    "gpg_vision": Protocol(
        "the release's R1-V and VisualThinker-R1-Zero evaluations (AMAP-ML/GPG): greedy; Visual-RFT's leave "
        "the sampling to the model's generation_config.json and allow 128 tokens on LISA",
        *(1, 0.0, 1.0, 1024),
        prompts={"vision_classification": "question", "cv-bench": "gpg_cv_bench"},
    ),
    "r1": Protocol("DeepSeek-R1's model card (2501.12948)", 64, 0.6, 0.95, 32768),
    "qwen-math": Protocol(
        "Qwen2.5-Math's evaluation/sh/eval.sh and math_eval.py (QwenLM/Qwen2.5-Math)",
        *(1, 0.0, 1.0, 2048),
        prompts={"math": "qwen_math"},
    ),
    "greedy": Protocol("no paper: the most likely response, as long as the model reads", 1, 0.0, 1.0, 32768),
}


def find_protocol(name: str) -> Protocol:
    """Raises: UserError: there is none of this name."""
    if name not in PROTOCOLS:
        raise UserError(f"--protocol {name} is unknown{did_you_mean(name, PROTOCOLS)}")
    return PROTOCOLS[name]
