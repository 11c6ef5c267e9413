"""A tokenizer whose tokens are characters, for several folders of tests."""

END = 0
"""Token of `CharacterTokenizer` that ends a response."""


class CharacterTokenizer:
    """Token n is character n; token 0 ends a response and is written as nothing."""

    chat_template = "given"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"[{messages[-1]['content']}]"

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(token) for token in tokens if token != END or not skip_special_tokens)

    def batch_decode(self, rows, skip_special_tokens):
        return [self.decode(row, skip_special_tokens) for row in rows]
