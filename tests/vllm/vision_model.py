"""A tiny random Qwen2.5-VL with its processor, and what transformers generates with it.

python vision_model.py make FOLDER | greedy FOLDER PROBLEMS.jsonl NUM_TOKENS | text FOLDER WORK NUM_TOKENS
"""

import json
import sys
from pathlib import Path

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

MARKS = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
SPECIAL = tuple(f"<|{mark}|>" for mark in MARKS)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(folder):
    """Heads of 32, the smallest that vLLM's attention on a CPU takes; a token per byte."""
    vocabulary = {
        token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    byte_level = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        extra_special_tokens={
            "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
        },
    )  # fmt: skip
    ids = {
        **{f"{name}_token_id": vocabulary[f"<|{name}_pad|>"] for name in ("image", "video")},
        **{f"vision_{end}_token_id": vocabulary[f"<|vision_{end}|>"] for end in ("start", "end")},
    }
    text = dict(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512, eos_token_id=2,
        pad_token_id=0, bos_token_id=None,
        rope_parameters={"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
    )  # fmt: skip
    vision = dict(
        depth=2, hidden_size=64, intermediate_size=96, num_heads=2, out_hidden_size=64,
        fullatt_block_indexes=[1],
    )  # fmt: skip
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    model = Qwen2_5_VLForConditionalGeneration(config).float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)  # large enough that the picture decides about the text
    model.save_pretrained(folder)
    images = Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=64 * 28 * 28)
    videos = Qwen2VLVideoProcessor()
    Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE).save_pretrained(folder)


def greedy(folder, file, num_tokens):
    """Write a JSON list of the texts that transformers generates."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor, texts = AutoProcessor.from_pretrained(folder), []
    for problem in map(json.loads, file.read_text().splitlines()):
        names = problem["metadata"]["images"]
        content = [*({"type": "image"} for _ in names), {"type": "text", "text": problem["question"]}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        images = [Image.open(file.parent / name).convert("RGB") for name in names]
        inputs = processor(text=[text], images=images, return_tensors="pt")
        tokens = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        response = tokens[0, inputs["input_ids"].shape[1] :]
        texts.append(processor.decode(response, skip_special_tokens=True))
    sys.stdout.write(json.dumps(texts) + "\n")


def text(folder, work, num_tokens):
    """Write how far vLLM's logprobs of an export's greedy responses to text alone are from transformers'."""
    from checkpoints_conv.hf_to_megatron import hf_to_megatron
    from checkpoints_conv.megatron_to_hf import megatron_to_hf
    from nemo_grpo.sampling.generate_vllm import VLLMGenerator
    from nemo_grpo.sampling.requests import Request, SamplingParams

    hf_to_megatron(folder, work / "megatron")
    export = megatron_to_hf(work / "megatron", folder, work / "export")
    prompts = [torch.randint(len(SPECIAL), 260, (n,)).tolist() for n in range(3, 35, 2)]
    sampling = SamplingParams(num_tokens, greedy=True, stop_token_ids=(2,))
    vllm = VLLMGenerator(export, "float32", max_model_len=96, cache_bytes=64 << 20)
    found = vllm.generate(Request(prompts, 1, sampling, 0))
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(export, dtype=torch.float32).eval()
    differences = []
    for i, prompt in enumerate(prompts):
        response = found.tokens[i, : found.lengths[i]]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([torch.tensor(prompt), response])[None]).logits[0]
        logprobs, tokens = logits[len(prompt) - 1 : -1].log_softmax(-1).max(-1)
        assert torch.equal(tokens, response), (i, tokens, response)
        differences.append(float((logprobs - found.logprobs[i, : len(response)]).abs().max()))
    sys.stdout.write(f"{max(differences)}\n")


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    function = {"make": make, "greedy": greedy, "text": text}[sys.argv[1]]
    function(folder, *map(Path, sys.argv[3:4]), *map(int, sys.argv[4:]))
