"""Tokenizer of a new model, which is trained on the texts of the task."""

import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import Task
from nemo_grpo.tasks.base import tags_of

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# This is Qwen2's pattern, because AutoTokenizer loads the folder as a Qwen2 tokenizer, which splits like
# that.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"

NUM_BYTES = 256
"""Number of tokens for single bytes, with which any text can be encoded."""

SEED_OFFSET = 1 << 31
"""Number that is added to the seed, so that the tokenizer is not trained on the first problems of a run."""
NUM_CORPUS_PROBLEMS = 2000
"""Number of problems on whose texts the tokenizer is trained."""


def build_tokenizer(task: Task, vocab_size: int, seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` tokens on training problems.

    Args:
        task: Task whose questions and demonstrations are the corpus.
        vocab_size: Largest number of tokens, with the special tokens and the task's tags.
        seed: Seed of the problems.
    """
    tags = tags_of(task)
    special_tokens = [PAD, START, END]
    num_tags = len(tags) + len(special_tokens)
    if vocab_size < NUM_BYTES + num_tags:
        raise UserError(
            f"nemo_grpo.new_model.vocab_size={vocab_size} is too small: {NUM_BYTES} bytes and {num_tags} "
            f"tags need at least {NUM_BYTES + num_tags}"
        )
    rng = random.Random(seed)
    corpus = []
    for index in range(NUM_CORPUS_PROBLEMS):
        problem = task.train_problem(index, SEED_OFFSET + seed)
        corpus.append(problem.question)
        corpus.append(task.demonstration(problem, rng))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=special_tokens,
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    # The tags are not special tokens: decoding with skip_special_tokens=True would hide them from the reward.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
