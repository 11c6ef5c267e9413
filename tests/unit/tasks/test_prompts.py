"""From problem to prompt tokens."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from nemo_grpo.engine.task_tokenizer import build_tokenizer
from nemo_grpo.support.errors import UserError
from nemo_grpo.tasks import PRESETS, Problem, Prompt, chat_messages, encode_prompt, parse_task
from nemo_grpo.tasks.prompts import check_vocabulary, encode_many

PROBLEM = Problem("id", "What is {1}?", "1")


class CharacterTokenizer:
    """One token per character, a beginning of sequence; a chat template that can be read in the tokens."""

    name_or_path = "characters"
    eos_token, eos_token_id = "$", ord("$")

    def __init__(self, chat_template="given", ending=""):
        self.chat_template, self.ending = chat_template, ending

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"

    def __call__(self, text, add_special_tokens=True):
        if not isinstance(text, str):
            return {"input_ids": [self(one, add_special_tokens)["input_ids"] for one in text]}
        framed = "^" + text + self.ending if add_special_tokens else text
        return {"input_ids": [ord(character) for character in framed]}


def text_of(prompt, tokenizer):
    """The prompt's tokens as text, ^ for the beginning of sequence."""
    return "".join(map(chr, encode_prompt(tokenizer, prompt, PROBLEM)))


def test_a_conversation_keeps_its_turns_and_its_own_system_message():
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    own = {"role": "system", "content": "Own."}
    prompt = Prompt(system="Recipe.", template="Q: {question}")
    question, recipes = {"role": "user", "content": "Q: 1 + 1?"}, {"role": "system", "content": "Recipe."}
    assert chat_messages(prompt, Problem("a", "1 + 1?", "2", {}, (own, *turns))) == [own, *turns, question]
    problem = Problem("a", "1 + 1?", "2", {}, tuple(turns))
    assert chat_messages(prompt, problem) == [recipes, *turns, question]
    text = "".join(map(chr, encode_prompt(CharacterTokenizer(), prompt, problem)))
    assert text == "[system]Recipe.[user]Hi[assistant]Hello[user]Q: 1 + 1?[assistant]"


def test_encode_prompt_ends_where_the_response_begins():
    prompt = Prompt(system="S", template=r"\boxed{}: {question} {other}")
    prefixed = prompt.model_copy(update={"response_prefix": "<think>"})
    expected = r"[system]S[user]\boxed{}: What is {1}? {other}[assistant]"
    assert text_of(prompt, CharacterTokenizer()) == expected
    assert text_of(prefixed, CharacterTokenizer()) == expected + "<think>"
    assert text_of(Prompt(system=""), CharacterTokenizer()) == "[user]What is {1}?[assistant]"


def test_missing_slots_and_chat_templates_are_refused():
    with pytest.raises(ValueError, match=r"no slot for the problem; put \{question\} there"):
        Prompt(template="Solve it")
    with pytest.raises(UserError, match="no chat template"):
        encode_prompt(CharacterTokenizer(None), Prompt(), PROBLEM)


def test_without_chat_template_the_messages_stand_alone():
    prompt = Prompt(system="S", template="Q: {question}", use_chat_template=False, response_prefix="A:")
    assert text_of(prompt, CharacterTokenizer(None)) == "^S\nQ: What is {1}?A:"


@pytest.mark.parametrize(
    ("template", "ending"), [("{question}", ""), ("{question}", "$"), ("{question}$", "")]
)
def test_the_tokenizers_own_end_of_sequence_is_not_behind_the_prompt(template, ending):
    """One that the template has stays."""
    prompt = Prompt(template=template, use_chat_template=False)
    tokenizer = CharacterTokenizer(None, ending)
    expected = f"^{template}".replace("{question}", "What is {1}?")
    assert text_of(prompt, tokenizer) == expected
    assert encode_many(tokenizer, prompt, [PROBLEM] * 2) == [list(map(ord, expected))] * 2


def test_a_chat_template_that_refuses_the_messages_is_a_user_error():
    """Gemma's takes no system message."""
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('No system role.') }}{% endif %}?"
    base = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, chat_template=template)
    assert encode_prompt(tokenizer, Prompt(), PROBLEM) == [0]
    refused = r"refuses the messages \(system and user\): No system role; .*prompt\.system=null"
    with pytest.raises(UserError, match=refused):
        encode_prompt(tokenizer, Prompt(system="S"), PROBLEM)


def test_presets_have_the_slot_once():
    assert {name: Prompt(preset=name).template.count("{question}") for name in PRESETS} == dict.fromkeys(
        PRESETS, 1
    )


def test_a_token_beyond_the_models_vocabulary_is_refused_by_the_problems_name():
    check_vocabulary([0, 9], PROBLEM, 10)
    check_vocabulary([10], PROBLEM, None)
    with pytest.raises(UserError, match=r"problem 'id': .* gives token 10, and .* vocab_size is 10"):
        check_vocabulary([0, 10, 3], PROBLEM, 10)


@pytest.mark.parametrize("use_chat_template", [True, False])
def test_many_prompts_are_encoded_as_one_by_one(use_chat_template):
    tokenizer = build_tokenizer(parse_task({"name": "knights_knaves"}).build(), 300, 0)
    prompt = Prompt(system="Think.", response_prefix="<think>", use_chat_template=use_chat_template)
    problems = [Problem(str(n), f"{n} + {n * n}", "0", {}) for n in range(5)]
    assert encode_many(tokenizer, prompt, problems) == [encode_prompt(tokenizer, prompt, p) for p in problems]
    assert encode_many(tokenizer, prompt, []) == []
