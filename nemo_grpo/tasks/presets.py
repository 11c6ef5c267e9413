"""The papers' prompts by name, for ``nemo_grpo.prompt.preset``."""

from typing import Any

_CONVERSATION = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
    "The assistant first thinks about the reasoning process in the mind and then provides the user with "
    "the answer"
)
_TAGS = (
    " The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, "
    "respectively, i.e., <think> reasoning process here </think>{space}<answer> answer here </answer>"
)
_BLOCKS = "Output the thinking process in <think> </think> and final answer{what} in <answer> </answer> tags."
_MONOLOGUE = (
    "You are a helpful AI Assistant, designed to provided well-reasoned and detailed responses. You FIRST "
    "think about the reasoning process as an internal monologue and then provide the user with the answer."
)

PRESETS: dict[str, dict[str, Any]] = {
    # CW-GRPO Figure 4, the open-rs prompt. The paper's text lost the backslash and braces of \boxed{}.
    "cw_grpo": dict(
        system=f"{_CONVERSATION}, and put your final answer within \\boxed{{}} ."
        f"{_TAGS.format(space=' ')}. Note that respond by English, NOT use other languages."
    ),
    # GPG Appendix B.4, system prompt for the 1.5B model.
    "gpg": dict(system=f"{_CONVERSATION}.{_TAGS.format(space='')}"),
    # GPG Appendix B.4, Qwen 7B. Here, too, the paper's text has "boxed" alone.
    "gpg_7b": dict(
        system="You are a helpful assistant.",
        template="{question}\nPlease reason step by step, and put your final answer within \\boxed{}.",
    ),
    # open-r1's simple-RL configuration, which GPG's section 2 names for its experiments on MATH.
    "simple_rl": dict(
        system=f"{_MONOLOGUE} The reasoning process MUST BE enclosed within <think> and </think> tags."
    ),
    # GPG's release for the same experiments.
    "gpg_math": dict(
        system=f"{_MONOLOGUE} Please reason step by step, and put your final answer within \\boxed{{}}."
    ),
    # TR-GRPO Appendix B.1.2: "no instruction-tuned templates are applied".
    "tr_grpo_math": dict(
        template="{question} Let's think step by step and output the final answer within \\boxed{ }.",
        use_chat_template=False,
    ),
    # The evaluation tasks for lighteval in the releases of CW-GRPO, GPG and open-rs.
    "lighteval": dict(
        template="Solve the following math problem efficiently and clearly.  The last line of your response "
        "should be of the following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is "
        "correct' (without quotes) where ANSWER is just the final number or expression that solves the "
        "problem. Think step by step before answering.\n\n{question}"
    ),
    # Qwen2.5-Math's evaluation, its prompt type qwen25-math-cot.
    "qwen_math": dict(system="Please reason step by step, and put your final answer within \\boxed{}."),
    # TR-GRPO Appendix B.1.1, Logic-RL's prompt: the response begins inside the think tag.
    "tr_grpo_logic": dict(
        system="You are a helpful assistant. The assistant first thinks about the reasoning process in the "
        "mind and then provides the user with the answer. The reasoning process and answer are enclosed "
        "within <think></think> and <answer></answer> tags, respectively, i.e., <think>reasoning process "
        "here </think><answer> answer here </answer>. Now the user asks you to solve a logical reasoning "
        "problem. After thinking, when you finally reach a conclusion, clearly state the identity of each "
        "character within <answer></answer> tags. i.e., <answer> (1) Zoey is a knight\n (2) ... </answer>.",
        response_prefix="<think>",
    ),
    # GPG's release, vision: R1-V's grpo.py; VisualThinker-R1-Zero's grpo.py for instruction-tuned models, and
    # its evaluation on CV-Bench; Visual-RFT's data sets, which ask by themselves; its grpo_lisa.py.
    "gpg_geoqa": dict(template=f"{{question}}  {_BLOCKS.format(what=' (number)')}"),
    "gpg_sat": dict(template=f"{{question}}  {_BLOCKS.format(what=' (option)')}"),
    "gpg_cv_bench": dict(template=f"{{question}}\n{_BLOCKS.format(what='')}"),
    "question": dict(template="{question}"),
    "gpg_grounding": dict(
        template="Output the bounding box in the image corresponding to the instruction: {question} Output "
        'the thinking process in <think> </think> and your grouding box. Following "<think> thinking process '
        '</think>\n<answer>(x1,y1),(x2,y2)</answer>)" format.'
    ),
    # TR-GRPO Appendix B.1.3 follows Search-R1 in verl-tool: examples/data_preprocess/search_r1.py there.
    "search_qa": dict(
        system="You are a helpful and harmless assistant.",
        template="Answer the given question. You must conduct reasoning inside <think> and </think> first "
        "every time you get new information. After reasoning, if you find you lack some knowledge, you can "
        "call a search engine by <search> query </search> and it will return the top searched results "
        "between <information> and </information>. You can search as many times as your want. If you find no "
        "further external knowledge needed, you can directly provide the answer inside <answer> and "
        "</answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: "
        "{question}",
    ),
}
"""Name -> fields of `Prompt`. ERPO prints none; its boxed rate asks for one with
\\boxed, such as ``gpg_7b``."""
