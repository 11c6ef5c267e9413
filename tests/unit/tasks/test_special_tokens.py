"""No text of a passage becomes one of a tokenizer's marks, with tokenizers of several kinds."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_search_qa import make as search_task
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_grpo.sampling.episodes import text_reader
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import parse_task
from nemo_grpo.tasks.base import Episode, tags_of
from nemo_grpo.tasks.retriever import Passage
from nemo_grpo.tasks.search_qa import SEARCH_TAGS
from nemo_grpo.tasks.special_tokens import broken_up, refuse_special_tags, reserved_texts

MARKS = ("<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "<|im_end|>", "<end_of_turn>", "<tool_call>", "!")


def make(normalizer=None, normalized=False):
    """One token per character, the marks, a word and a run of spaces that were added, and our tags."""
    characters = ["<unk>", "\n", *map(chr, range(32, 127))]
    base = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if normalizer is not None:
        base.normalizer = normalizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="</s>", unk_token="<unk>")
    special = [text for text in MARKS if text != "<tool_call>"]
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [AddedToken(t, special=True, normalized=normalized) for t in special]}
    )
    plain = ("<tool_call>", "transformer", "    ", *SEARCH_TAGS)
    tokenizer.add_tokens([AddedToken(text, normalized=normalized) for text in plain])
    return tokenizer


TOKENIZERS = {
    "plain": make(),
    "normalised": make(normalizers.NFKC(), normalized=True),
    "lower case": make(normalizers.Lowercase(), normalized=True),
    "nmt": make(normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()]), normalized=True),
    "bert": make(normalizers.BertNormalizer(), normalized=True),
    "accents": make(normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()]), normalized=True),
}
RESERVED = {kind: reserved_texts(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
ADDED = {kind: set(tokenizer.added_tokens_decoder) for kind, tokenizer in TOKENIZERS.items()}
FULL_WIDTH = "\uff1cs\uff1e"
"""<s>, for a tokenizer that normalises."""
UNSEEN = ("\x01", "\x7f", "\u200b", "\u00ad", "\ufeff", "\u0301", "\u2060", "\n")
PIECES = st.sampled_from(
    [*MARKS, *SEARCH_TAGS, "<", ">", "</", "[", "|", " ", "  ", "s", "im_end", "<S>", FULL_WIDTH, *UNSEEN]
)
PASSAGES = st.lists(PIECES | st.text(string.printable, max_size=3), max_size=12).map("".join)


def observation(title, text, reserved, **config):
    task = search_task({"q": [Passage("1", title, text)]}, **config)
    (observed,) = task.observe([Episode()], ["<search>q</search>"], reserved)
    return observed.observation


@settings(max_examples=40, deadline=None)
@given(title=PASSAGES, text=PASSAGES, most=st.integers(16, 60))
def test_no_passage_holds_a_mark_of_the_tokenizer(title, text, most):
    # !: a mark of one character; <unk>: a character that this vocabulary has not
    of_text = ("transformer", "    ", "<unk>", "!")
    for kind, tokenizer in TOKENIZERS.items():
        seen = observation(title, text, RESERVED[kind], max_information_chars=most)
        tokens = tokenizer(seen, add_special_tokens=False)["input_ids"]
        marks = [tokenizer.convert_ids_to_tokens(t) for t in tokens if t in ADDED[kind]]
        found = [mark for mark in marks if mark not in of_text]
        assert found == ["<information>", "</information>"], kind


def test_a_passage_without_marks_is_given_as_it_is():
    text = "1 < 2, a[i] > b; \uff1cfull \ufb01ne - the transformer    <br> <S >"
    assert broken_up(text, RESERVED["plain"]) == text
    assert text in observation("", text, RESERVED["plain"])
    assert reserved_texts(object()) == ()


def test_marks_are_broken_up_by_a_space():
    reserved = RESERVED["plain"]
    assert broken_up("a</s>b[INST]c<<SYS>>d", reserved) == "a< /s>b[ INST]c< <SYS>>d"
    assert broken_up("</S>", reserved) == "< /S>"
    assert broken_up(FULL_WIDTH, reserved) == "\uff1c s\uff1e"
    # one mark that overlaps another, and one that the first one's space completes
    assert broken_up("abc", ("ab", "bc")) == "a b c"
    assert broken_up("ab", ("ab", "a b")) == "a  b"
    assert broken_up("5 \u338f!", ("kg",)) == "5 k g!"  # a character that stands for a mark
    assert broken_up("Hello! What!", ("!",)) == "Hello! What!"  # one of one character stays
    assert broken_up("a\u200bb", ("a b",)) == "a  \u200bb"  # dropped or a space, both are broken


@pytest.mark.parametrize("kind", ["nmt", "bert", "accents"])
@pytest.mark.parametrize(
    "text", ["<tool\x01_call>", "<t\u00f3ol_call>", "\uff1ctoo\u0301l_call\u200b>", "<tool_call>"]
)
def test_marks_that_a_normaliser_uncovers_are_broken_up(kind, text):
    tokenizer = TOKENIZERS[kind]
    broken = broken_up(text, RESERVED[kind])
    assert broken.replace(" ", "") == text
    assert "<tool_call>" not in tokenizer.tokenize(broken)


WRITTEN = "<s><think>1</think><answer>2</answer></s>!"


@pytest.mark.parametrize(
    ("special", "task", "read"),
    [
        ((), "math", "<think>1</think><answer>2</answer>"),
        (("<answer>", "</answer>", "<search>"), "math", "<think>1</think><answer>2</answer>"),
        (("<answer>", "<search>"), "search_qa", "<search><think>1</think><answer>2</answer>"),
    ],
)
def test_a_tasks_tags_are_read_though_they_are_special_tokens(special, task, read):
    """Other special tokens vanish, a stop token and a tag of another task among them."""
    tokenizer, task = make(), parse_task({"name": task}).build()
    tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken(t, special=True) for t in special]})
    ids = tokenizer("<search>" * ("<search>" in special) + WRITTEN, add_special_tokens=False)["input_ids"]
    assert all(tokenizer.convert_tokens_to_ids(text) in ids for text in special)
    assert [text.replace(" ", "") for text in text_reader(tokenizer, task)([ids, ids])] == [read] * 2


def test_an_engine_that_drops_special_tokens_refuses_tags_among_them():
    tokenizer, tags = make(), tags_of(parse_task({"name": "search_qa"}).build())
    refuse_special_tags(tokenizer, tags)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<search>", "</think>"]})
    with pytest.raises(UserError, match=r"has </think>, <search> as special tokens, which NeMo-RL drops"):
        refuse_special_tags(tokenizer, tags)
