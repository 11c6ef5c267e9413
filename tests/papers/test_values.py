"""Every value of every cluster recipe that a paper, or the code it names, decides: none can change unseen.

A recipe is a setting (data, batch, schedule, sampling, rewards, prompt) with a loss. Each of both names its
source; the values are written here once more, not read from anywhere.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from nemo_grpo.recipe import Recipe, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
FILES = {
    path.stem: path for p in ("cw_grpo", "erpo", "tr_grpo", "gpg") for path in (RECIPES / p).glob("*.yaml")
}

ACCURACY, AND_FORMAT = {"accuracy": 1.0}, {"accuracy": 1.0, "format": 1.0}
CW_PROMPT, GPG_PROMPT, BOXED, OPEN_R1 = "2a7a2a36", "f09ff987", "2818c7c5", "57ee8032"

EPOCHS, SAVES = 1000, (20, 3)  # of a recipe that states none
CONSTANT = dict(lr=1e-6, schedule="constant", min_lr=0.0, warmup=0, weight_decay=0.0)
COSINE = CONSTANT | dict(schedule="cosine", min_lr=1e-7, warmup=10)
# CW-GRPO Table 5, appendices B and C; schedule of the release. 12 prompts: docs/papers.md.
CW = COSINE | dict(prompts=12, responses=12, updates=1, steps=100, prompt_tokens=512, tokens=4096,
                   temperature=0.7, rewards=AND_FORMAT, form="think", prompt=CW_PROMPT,
                   data=["open-rs"])  # fmt: skip
CW_200 = CW | dict(steps=200, warmup=20, saves=(50, 4))
CW_7B = CW | dict(tokens=3584)  # the model reads 4096
# ERPO Table 3, sections 5.1 and A.3; steps: the epoch of the 8388 problems that docs/evaluation.md counts.
ERPO = dict(prompts=2, responses=8, updates=1, epochs=1, steps=8388 // 2, lr=5e-6, schedule="cosine",
            min_lr=0.0, warmup=420, weight_decay=0.001, prompt_tokens=512, tokens=1536, temperature=1.0,
            rewards=ACCURACY, form="boxed", prompt=BOXED, data=["math-l35"], saves=(25, 168))  # fmt: skip
# Section 5.1 and appendix A.2: the same MATH training set, 3 epochs; the rest as for GRPO and ERPO, Table 3.
ERPO_SFT = ERPO | dict(prompts=16, responses=1, epochs=3, steps=3 * (8388 // 16), warmup=158)
# TR-GRPO Tables 5 and 6, appendix B.1; epochs and weight decay: train_kklogic_baseline and fsdp_workers.py of
# zhyang2226/AR-Lopti; prompt length is not in the paper.
LOGIC = CONSTANT | dict(prompts=64, responses=8, updates=2, epochs=5, steps=5 * (4500 // 64),
                        weight_decay=0.01, prompt_tokens=1024, tokens=4096, temperature=0.7,
                        rewards={"format_signed": 1.0, "answer": 1.0}, form="tags", prompt="9ab1daac",
                        data=["kk-3to7"])  # fmt: skip
DSR = LOGIC | dict(prompts=128, steps=5 * (10000 // 128), temperature=1.0, rewards=ACCURACY, form="boxed",
                   prompt="ffd22728", data=["dsr-uniform"])  # fmt: skip
ORZ = DSR | dict(steps=445, data=["orz-57k"])
# Turns and prompt: TIGER-AI-Lab/verl-tool, train/search_r1/train_3b.sh, data_preprocess/search_r1.py.
SEARCH = LOGIC | dict(prompts=32, updates=1, steps=400, temperature=0.8, rewards={"answer": 1.0}, form=None,
                      turns=3, prompt="65456d90", data=["nq-train", "hotpotqa-train"])  # fmt: skip
# GPG appendix B.1 and B.4; lengths are not in the paper.
ZERO = CONSTANT | dict(prompts=144, responses=8, updates=1, steps=1100, weight_decay=0.1, prompt_tokens=1024,
                       tokens=3072, temperature=1.0, rewards=ACCURACY, form="boxed", prompt=BOXED,
                       data=["dapo-math-17k"])  # fmt: skip
# GPG section 2: open-r1's config_simple_rl.yaml without the format reward; batch and group of the release.
MATH = ZERO | dict(prompts=64, steps=117, lr=3e-6, schedule="cosine", warmup=12, weight_decay=0.0,
                   prompt_tokens=512, tokens=1024, temperature=0.9, prompt=OPEN_R1,
                   data=["math-lighteval"])  # fmt: skip
MATH_RELEASE = MATH | dict(lr=2e-6, schedule="constant", prompt="c34ad73a")  # config_simple_rl_gpg.yaml
# GPG appendix B.1: open-rs for 100 and 50 steps; its values are open-rs's grpo.yaml and README.
RS1 = COSINE | dict(prompts=12, responses=6, updates=1, steps=100, prompt_tokens=512, tokens=3584,
                    temperature=0.7, rewards=AND_FORMAT, form="think_answer", prompt=GPG_PROMPT,
                    data=["open-s1"])  # fmt: skip
RS1_RELEASE = RS1 | dict(prompts=64, rewards={"format": 1.0, "cosine": 2.0}, form="think_closed",
                         prompt=CW_PROMPT)  # fmt: skip  # gpg.yaml and rewards.py of the release's open-rs
RS3 = RS1 | dict(steps=50, warmup=5, data=["open-rs"])
# GPG Tables 5 to 8: the launch scripts of the release's R1-V, VisualThinker-R1-Zero and Visual-RFT.
GEOQA = CONSTANT | dict(prompts=16, responses=8, updates=1, steps=500, schedule="linear", prompt_tokens=None,
                        tokens=256, temperature=1.0, rewards=AND_FORMAT, form="think_answer",
                        prompt="99c3a77c", data=["geoqa"])  # fmt: skip
SAT = GEOQA | dict(prompts=8, steps=3000, tokens=700, form=None, prompt="3d57311b", data=["sat"],
                   saves=(100, 3))  # fmt: skip
FLOWERS = GEOQA | dict(steps=204, form=None, prompt="419547fd", data=["flower102"])
LISA = FLOWERS | dict(steps=90, rewards={"iou": 1.0, "format": 1.0}, prompt="bed94242", data=["lisa-train"],
                      saves=(30, 3))  # fmt: skip

GROUPS = dict(advantage_eps=1e-6, aggregation="group_token_mean")
CLIP = GROUPS | dict(normalize_rewards=True, ratio_clip_min=0.2, ratio_clip_max=0.2,
                     reference_policy_kl_type="k3")  # fmt: skip
CODE = dict(aggregation="sequence_mean", reference_policy_kl_penalty=0.04)  # of the trainers compared with
L_CW = CLIP | CODE | dict(advantage_eps=1e-4, logprob_centering="response", scope="group",
                          ratio_clip_min=None, ratio_clip_max=None)  # fmt: skip  # section 2.3: no clip
L_CW_GRPO = CLIP | CODE | dict(advantage_eps=1e-4)  # section 2.3
L_COV = (
    CLIP | CODE | dict(advantage_eps=1e-4, clip_fraction=2e-4, covariance_min=1.0, covariance_max=5.0)
)  # 2505.22617
L_ERPO_GRPO = CLIP | dict(reference_policy_kl_penalty=0.001, advantage_eps=1e-4)  # Eq. 5, Table 3; TRL
# ERPO section 5.1; the last three are not in the paper.
L_ERPO = L_ERPO_GRPO | dict(gamma=5.0, eta=0.2, beta_progress=0.1, entropy_statistics="group",
                            num_buckets=10, sigma_target=1.0, delta=1e-4)  # fmt: skip
L_SFT = dict(aggregation="token_mean", advantage_eps=1e-6)  # section 5.1: cross entropy
L_TR_GRPO = CLIP | dict(ratio_clip_max=0.24, reference_policy_kl_penalty=0.001)  # Eq. 5, Table 6
L_TR = L_TR_GRPO | dict(alpha=2.0, mu=0.25, tau=9.0, lower=1.0, upper=1.4, tau_convention="multiply",
                        weight_placement="outside", kl_weighting="inside",
                        weighting="probability")  # fmt: skip  # Eqs. 10-12, appendix B.2
GPG = GROUPS | dict(reward_normalization="none", use_alpha=True, reference_policy_kl_type="k3")  # Eqs. 5-8
L_GPG = GPG | dict(
    valid_fraction_threshold=0.6, max_resample_attempts=20, draws=True
)  # B.1; the release's code
L_SEEN = L_GPG | dict(valid_fraction_threshold=0.4)  # the vision scripts' min_inverse_alpha
L_DAPO = CLIP | dict(ratio_clip_max=0.28, draws=True)  # 2503.14476, Eq. 8 and section 4.1
L_DR = CLIP | dict(aggregation="constant", max_response_length=1024, normalize_rewards=None)  # Table 14
L_MATH_GRPO = CLIP | CODE | dict(advantage_eps=1e-4)  # Eq. 28; the others are open-r1's trainer's

TABLE: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # recipes                                             setting, loss, table
    ("cw_grpo-r1-distill-qwen-1.5b-1n8g", CW, L_CW, "CW-GRPO Tables 2, 5"),
    ("grpo-r1-distill-qwen-1.5b-1n8g", CW, L_CW_GRPO, "CW-GRPO Table 2"),
    ("cw_grpo-r1-distill-qwen-1.5b-200steps-1n8g", CW_200, L_CW, "CW-GRPO Table 3"),
    ("grpo-r1-distill-qwen-1.5b-200steps-1n8g", CW_200, L_CW_GRPO, "CW-GRPO Table 3"),
    ("clip_cov-r1-distill-qwen-1.5b-1n8g", CW, L_COV, "CW-GRPO Table 2"),
    ("cw_grpo-qwen2.5-math-7b-instruct-1n8g", CW_7B, L_CW, "CW-GRPO Tables 2, 5"),
    ("cw_grpo-qwen2.5-math-7b-instruct-release-1n8g",
     CW_7B | dict(steps=150, warmup=15, rewards=ACCURACY, saves=(50, 3)), L_CW,
     "the release's gaussian_7b.yaml"),
    ("grpo-qwen2.5-math-7b-instruct-1n8g", CW_7B, L_CW_GRPO, "CW-GRPO Table 2"),
    ("clip_cov-qwen2.5-math-7b-instruct-1n8g", CW_7B, L_COV, "CW-GRPO Table 2"),
    ("cw_grpo-qwen3-30b-a3b-4n8g", CW | dict(tokens=16384), L_CW, "layout only"),
    ("erpo-qwen2.5-1.5b-1n8g erpo-qwen2.5-3b-1n8g erpo-qwen2.5-7b-1n8g", ERPO, L_ERPO,
     "ERPO Tables 1, 3"),
    ("grpo-qwen2.5-1.5b-1n8g grpo-qwen2.5-3b-1n8g grpo-qwen2.5-7b-1n8g", ERPO, L_ERPO_GRPO,
     "ERPO Tables 1, 3"),
    ("sft-qwen2.5-1.5b-1n8g sft-qwen2.5-3b-1n8g sft-qwen2.5-7b-1n8g", ERPO_SFT, L_SFT, "ERPO Tables 1, 2"),
    ("erpo-qwen2.5-32b-2n8g", ERPO, L_ERPO, "layout only"),
    ("tr_grpo-qwen2.5-3b-instruct-logic-1n8g tr_grpo-qwen2.5-7b-instruct-1m-logic-1n8g", LOGIC, L_TR,
     "TR-GRPO Tables 1, 5, 6"),
    ("grpo-qwen2.5-3b-instruct-logic-1n8g grpo-qwen2.5-7b-instruct-1m-logic-1n8g", LOGIC, L_TR_GRPO,
     "TR-GRPO Tables 1, 5, 6"),
    ("tr_grpo-qwen2.5-3b-base-logic-1n8g tr_grpo-mistral-7b-instruct-v0.3-logic-1n8g "
     "tr_grpo-llama-3.1-8b-instruct-logic-1n8g", LOGIC, L_TR, "TR-GRPO Table 9"),
    ("grpo-qwen2.5-3b-base-logic-1n8g grpo-mistral-7b-instruct-v0.3-logic-1n8g "
     "grpo-llama-3.1-8b-instruct-logic-1n8g", LOGIC, L_TR_GRPO, "TR-GRPO Table 9"),
    ("tr_grpo-llama-3.1-70b-instruct-logic-8n8g", LOGIC, L_TR, "layout only"),
    ("tr_grpo-qwen2.5-7b-dsr-1n8g", DSR, L_TR, "TR-GRPO Tables 2, 6"),
    ("grpo-qwen2.5-7b-dsr-1n8g", DSR, L_TR_GRPO, "TR-GRPO Tables 2, 6"),
    ("tr_grpo-qwen2.5-7b-orz-1n8g", ORZ, L_TR, "TR-GRPO Tables 2, 6"),
    ("grpo-qwen2.5-7b-orz-1n8g", ORZ, L_TR_GRPO, "TR-GRPO Tables 2, 6"),
    ("tr_grpo-qwen2.5-3b-search-1n8g tr_grpo-qwen3-4b-instruct-2507-search-1n8g", SEARCH, L_TR,
     "TR-GRPO Tables 3, 6"),
    ("grpo-qwen2.5-3b-search-1n8g grpo-qwen3-4b-instruct-2507-search-1n8g", SEARCH, L_TR_GRPO,
     "TR-GRPO Tables 3, 6"),
    ("gpg-qwen2.5-math-7b-zero-1n8g gpg-qwen2.5-math-7b-zero-6n8g", ZERO, L_GPG, "GPG Table 4, B.1"),
    ("dapo-qwen2.5-math-7b-zero-6n8g", ZERO, L_DAPO, "GPG Table 9"),
    ("gpg-qwen2.5-32b-4n8g", ZERO | dict(tokens=16384), L_GPG, "layout only"),
    ("gpg-qwen2.5-math-7b-math-1n8g", MATH, L_GPG, "GPG Tables 1, 15 D"),
    ("gpg-qwen2.5-math-7b-math-no_threshold-1n8g", MATH, GPG, "GPG Tables 1, 15 C"),
    ("gpg-qwen2.5-math-7b-math-no_alpha-1n8g", MATH, GPG | dict(use_alpha=None), "GPG Tables 1, 13, 15 B"),
    ("gpg-qwen2.5-math-7b-math-std-no_alpha-1n8g", MATH,
     GPG | dict(reward_normalization="group", use_alpha=None), "GPG Tables 1, 11, 13, 15 A"),
    ("gpg-qwen2.5-math-7b-math-std-1n8g", MATH, GPG | dict(reward_normalization="group"), "GPG Table 1"),
    ("gpg-qwen2.5-math-7b-math-batch-no_alpha-1n8g", MATH,
     GPG | dict(reward_normalization="batch", use_alpha=None), "GPG Table 13"),
    ("gpg-qwen2.5-math-7b-math-release-1n8g", MATH_RELEASE,
     L_GPG | dict(aggregation="token_mean", valid_fraction_threshold=0.5), "the release's values"),
    ("grpo-qwen2.5-math-7b-math-1n8g", MATH, L_MATH_GRPO, "GPG Tables 1, 15"),
    ("dr_grpo-qwen2.5-math-7b-math-1n8g", MATH, L_DR, "GPG Tables 1, 14"),
    ("gpg-r1-distill-qwen-1.5b-rs1-1n8g", RS1, L_GPG, "GPG Table 3, B.1"),
    ("gpg-r1-distill-qwen-1.5b-rs1-release-1n8g", RS1_RELEASE,
     GPG | dict(aggregation="token_mean", reward_normalization="group", use_alpha=None, advantage_eps=1e-4),
     "the release's gpg.yaml and gpg_trainer.py"),
    ("gpg-r1-distill-qwen-1.5b-rs3-1n8g", RS3, L_GPG, "GPG Table 3, B.1"),
    ("grpo-r1-distill-qwen-1.5b-rs1-1n8g", RS1, L_CW_GRPO, "GPG Table 3, open-rs"),
    ("grpo-r1-distill-qwen-1.5b-rs3-1n8g", RS3, L_CW_GRPO, "GPG Table 3, open-rs"),
    ("gpg-qwen2.5-vl-3b-geoqa-1n8g", GEOQA, L_SEEN, "GPG Table 5"),
    ("gpg-qwen2.5-vl-3b-few-shot-1n8g", FLOWERS, L_SEEN, "GPG Table 6"),
    ("gpg-qwen2.5-vl-3b-cv-bench-1n8g", SAT, L_SEEN, "GPG Table 7"),
    ("gpg-qwen2.5-vl-3b-lisa-1n8g", LISA, L_SEEN, "GPG Table 8"),
    ("grpo-qwen2.5-vl-3b-geoqa-1n8g", GEOQA, L_MATH_GRPO, "GPG Table 5"),
    ("grpo-qwen2.5-vl-3b-few-shot-1n8g", FLOWERS, L_MATH_GRPO, "GPG Table 6"),
    ("grpo-qwen2.5-vl-3b-cv-bench-1n8g", SAT, L_MATH_GRPO, "GPG Table 7"),
    ("grpo-qwen2.5-vl-3b-lisa-1n8g", LISA, L_MATH_GRPO, "GPG Table 8"),
]  # fmt: skip
CASES = [(name, setting, loss) for names, setting, loss, _ in TABLE for name in names.split()]
MODELS = {
    "mistral-7b-instruct-v0.3": "mistralai/Mistral-7B-Instruct-v0.3",
    "llama-3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "r1-distill-qwen-1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-3b": "Qwen/Qwen2.5-3B",
    "qwen2.5-3b-instruct": "Qwen/Qwen2.5-3B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-7b-instruct-1m": "Qwen/Qwen2.5-7B-Instruct-1M",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B",
    "qwen2.5-math-7b": "Qwen/Qwen2.5-Math-7B",
    "qwen2.5-math-7b-instruct": "Qwen/Qwen2.5-Math-7B-Instruct",
    "qwen2.5-vl-3b": "Qwen/Qwen2.5-VL-3B-Instruct",
    "qwen3-4b-instruct-2507": "Qwen/Qwen3-4B-Instruct-2507",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "llama-3.1-70b-instruct": "meta-llama/Llama-3.1-70B-Instruct",
}
"""The longest name that a recipe's name holds -> its model."""


def setting_of(recipe: Recipe) -> dict[str, Any]:
    grpo, generation, megatron = recipe.grpo, recipe.policy.generation, recipe.policy.megatron_cfg
    own = recipe.nemo_grpo
    prompt = [
        getattr(own.prompt, key) for key in ("system", "template", "use_chat_template", "response_prefix")
    ]
    return {
        "prompts": grpo.num_prompts_per_step,
        "responses": grpo.num_generations_per_prompt,
        "updates": recipe.num_updates_per_step,
        "steps": grpo.max_num_steps,
        "lr": megatron.optimizer.lr,
        "min_lr": megatron.optimizer.min_lr,
        "weight_decay": megatron.optimizer.weight_decay,
        "schedule": megatron.scheduler.lr_decay_style,
        "warmup": megatron.scheduler.lr_warmup_iters,
        "prompt_tokens": recipe.to_dict().get("data", {}).get("max_input_seq_length"),
        "tokens": generation.max_new_tokens,
        "temperature": generation.temperature,
        "rewards": dict(own.rewards),
        "form": getattr(own.task, "form", None),
        "turns": own.task.num_turns,
        "epochs": recipe.to_dict()["grpo"]["max_num_epochs"],
        "saves": (recipe.checkpointing.save_period, recipe.checkpointing.keep_top_k),
        "prompt": hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:8],
        "data": [Path(file).stem for file in own.task.train_files],
    }


def loss_of(recipe: Recipe) -> dict[str, Any]:
    """Every parameter that acts; those that are off, or have no effect beside the others, are left out."""
    draws, values = recipe.grpo.use_dynamic_sampling, recipe.loss_fn.model_dump(exclude={"variant"})
    idle = set() if draws else {"valid_fraction_threshold", "max_resample_attempts"}
    idle |= {"entropy_momentum"} if values.get("entropy_statistics") == "group" else set()
    idle |= {"max_response_length"} if values["aggregation"] != "constant" else set()
    return acting({key: value for key, value in values.items() if key not in idle} | {"draws": draws})


def acting(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, False)}


@pytest.mark.parametrize(("name", "setting", "loss"), CASES, ids=[name for name, *_ in CASES])
def test_recipe_has_the_papers_values(name, setting, loss):
    recipe = load_recipe(FILES[name])
    assert setting_of(recipe) == dict(epochs=EPOCHS, saves=SAVES, turns=1) | setting
    assert loss_of(recipe) == acting(loss)
    assert recipe.policy.generation.top_p == 1.0
    assert recipe.policy.model_name == MODELS[max((m for m in MODELS if f"-{m}-" in name), key=len)]


def test_every_recipe_has_its_values_in_the_table():
    assert sorted(name for name, *_ in CASES) == sorted(name for name in FILES if not name.endswith("-fp8"))


@pytest.mark.parametrize("name", sorted(name for name in FILES if name.endswith("-fp8")))
def test_fp8_recipe_differs_in_precision_alone(name):
    recipe, base = load_recipe(FILES[name]), load_recipe(FILES[name.removesuffix("-fp8")])
    assert setting_of(recipe) == setting_of(base)
    assert loss_of(recipe) == loss_of(base) | {"use_importance_sampling_correction": True}


def test_lora_of_erpo_is_the_papers():  # section 5.1
    for name in (name for name in FILES if name.startswith("erpo-")):
        peft = load_recipe(FILES[name]).policy.megatron_cfg.peft
        assert peft is not None
        assert (peft.enabled, peft.dim, peft.alpha, len(peft.target_modules)) == (True, 32, 64, 4)
