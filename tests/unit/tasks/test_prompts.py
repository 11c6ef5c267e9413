"""From problem to prompt tokens."""

import pytest

from nemo_grpo.errors import UserError
from nemo_grpo.tasks import Problem, Prompt, chat_messages, encode_prompt

PROBLEM = Problem("id", "What is {1}?", "1")


class CharacterTokenizer:
    """One token per character; a chat template that can be read in the tokens."""

    chat_template = "given"
    name_or_path = "characters"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert (tokenize, add_generation_prompt) == (False, True)
        return "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"

    def __call__(self, text, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [ord(character) for character in text]}


def test_only_the_slot_is_replaced():
    prompt = Prompt(template=r"Put it in \boxed{}: {question} {other}")
    assert chat_messages(prompt, PROBLEM) == [
        {"role": "user", "content": r"Put it in \boxed{}: What is {1}? {other}"}
    ]


def test_system_message_comes_first_and_only_if_there_is_one():
    assert chat_messages(Prompt(system="Think."), PROBLEM)[0] == {"role": "system", "content": "Think."}
    assert [message["role"] for message in chat_messages(Prompt(system=""), PROBLEM)] == ["user"]


def test_encode_prompt_ends_where_the_response_begins():
    ids = encode_prompt(CharacterTokenizer(), Prompt(system="S", template="Q: {question}"), PROBLEM)
    assert "".join(map(chr, ids)) == "[system]S[user]Q: What is {1}?[assistant]"


def test_template_without_slot_is_a_user_error():
    with pytest.raises(UserError, match=r"needs \{question\}"):
        chat_messages(Prompt(template="Solve it"), PROBLEM)


def test_tokenizer_without_chat_template_is_a_user_error():
    tokenizer = CharacterTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        encode_prompt(tokenizer, Prompt(), PROBLEM)
