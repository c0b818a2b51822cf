"""A byte-level tokenizer with Qwen2.5-Omni's special tokens, at ids that follow the bytes."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eos>",
    "<chelsie>",
    "<ethan>",
)
ID = {token: 256 + at for at, token in enumerate(SPECIAL)}

# As the real one: parts of a message are text or name a medium by their type or key.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type in ('image', 'image_url') or 'image' in part %}"
    "<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif part.type in ('audio', 'audio_url', 'input_audio') or 'audio' in part %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif part.type in ('video', 'video_url') or 'video' in part %}"
    "<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Each byte is a token, so that any text survives."""
    plain = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: at for at, one in enumerate(plain)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "image_token": "<|IMAGE|>",
            "audio_token": "<|AUDIO|>",
            "video_token": "<|VIDEO|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
