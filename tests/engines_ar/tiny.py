"""A tiny seeded Qwen3 checkpoint with a byte-level tokenizer, as a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

IMAGE = "<|image|>"  # a plain entry of the vocabulary: the tokenizer does not call it special
_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def save_model(folder: Path, *, chat: bool = True) -> Path:
    tokenizer = _tokenizer(chat)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that vLLM's attention takes on CPU
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # wide enough that the likeliest token stands out
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


def _tokenizer(chat: bool) -> PreTrainedTokenizerFast:
    """Each byte is a token, so that any text survives."""
    plain = [*sorted(pre_tokenizers.ByteLevel.alphabet()), IMAGE]
    backend = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(plain)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|start|>"],
    )
    if chat:
        tokenizer.chat_template = _TEMPLATE
    return tokenizer
