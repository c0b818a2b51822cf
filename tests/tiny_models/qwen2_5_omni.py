"""A tiny random Qwen2.5-Omni: thinker with all its towers, talker, token2wav, two voices.

The special ids are the real model's, moved into small vocabularies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

from tests.tiny_models.tokens import ID, save_tokenizer

TEXT_VOCAB = 288
CODEC_VOCAB = 256  # the real one: 8448
CODEC_PAD, CODEC_BOS, CODEC_EOS, CODEC_MASK = 244, 245, 246, 248  # 8292, 8293, 8294, 8296
VOICES = {"Chelsie": ID["<chelsie>"], "Ethan": ID["<ethan>"]}

_MEDIA = {
    "audio_token_index": ID["<|AUDIO|>"],
    "image_token_index": ID["<|IMAGE|>"],
    "video_token_index": ID["<|VIDEO|>"],
    "audio_start_token_id": ID["<|audio_bos|>"],
    "audio_end_token_id": ID["<|audio_eos|>"],
    "vision_start_token_id": ID["<|vision_bos|>"],
    "vision_end_token_id": ID["<|vision_eos|>"],
    "position_id_per_seconds": 25,
    "seconds_per_chunk": 2,
}
_TEXT = {
    "vocab_size": TEXT_VOCAB,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": ID["<|im_start|>"],
    "eos_token_id": ID["<|im_end|>"],
    "pad_token_id": ID["<|endoftext|>"],
}
_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 128,
    "fullatt_block_indexes": [1],
    "spatial_merge_size": 2,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "window_size": 112,
    "in_channels": 3,
}
_AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "d_model": 64,
    "output_dim": 128,
    "n_window": 100,
    "max_source_positions": 1500,
}
_TALKER = {
    "vocab_size": CODEC_VOCAB,
    "embedding_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "max_window_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # times 4 heads is not the hidden size, as in the real one
    "max_position_embeddings": 2048,
    "tts_codec_pad_token_id": CODEC_PAD,
    "tts_codec_start_token_id": CODEC_BOS,
    "tts_codec_end_token_id": CODEC_EOS,
    "tts_codec_mask_token_id": CODEC_MASK,
    "tts_text_pad_token_id": ID["<tts_pad>"],
    "tts_text_start_token_id": ID["<tts_text_bos>"],
    "tts_text_end_token_id": ID["<tts_text_eos>"],
    "pad_token_id": None,
    **_MEDIA,
}
_DIT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "ff_mult": 2,
    "emb_dim": 32,
    "num_embeds": CODEC_VOCAB + 1,
    "mel_dim": 80,
    "block_size": 24,
    "look_ahead_layers": [1],
    "look_backward_layers": [0],
    "repeats": 2,
    "enc_emb_dim": 32,
    "enc_dim": 16,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
    "max_position_embeddings": 2048,
}
_BIGVGAN = {
    "mel_dim": 80,
    "upsample_initial_channel": 64,
    "resblock_kernel_sizes": [3],
    "resblock_dilation_sizes": [[1, 3, 5]],
    "upsample_rates": [5, 3, 2, 2, 2, 2],  # 240 samples a mel frame, as the real one
    "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
}
_PREPROCESSOR = {
    "processor_class": "Qwen2_5OmniProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "min_pixels": 28 * 28 * 4,
    "max_pixels": 28 * 28 * 64,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "n_samples": 480000,
    "nb_max_frames": 3000,
    "dither": 0.0,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def save(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    model = Qwen2_5OmniForConditionalGeneration(_config()).float().eval()
    with torch.no_grad():  # wide enough that the likeliest token stands out
        for part in (model.thinker.model, model.thinker.lm_head, model.talker):
            for parameter in part.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.12)
        make_audible(model.token2wav)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PREPROCESSOR, indent=1))
    torch.save(_voices(), folder / "spk_dict.pt")
    return folder


def make_audible(token2wav: Any, wild: float = 0.15) -> None:
    """As it was made, it would whisper far below what 16 bits can tell. `wild` is the standard
    deviation of the DiT's weights."""
    for parameter in token2wav.code2wav_dit_model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, wild)
    for parameter in token2wav.code2wav_bigvgan_model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.75 / parameter[0].numel() ** 0.5)


def _config() -> Qwen2_5OmniConfig:
    thinker = {
        "text_config": {**_TEXT, "rope_parameters": _rope()},
        "vision_config": _VISION,
        "audio_config": _AUDIO,
        "pad_token_id": _TEXT["pad_token_id"],
        "bos_token_id": _TEXT["bos_token_id"],
        **_MEDIA,
    }
    return Qwen2_5OmniConfig(
        thinker_config=thinker,
        talker_config={**_TALKER, "rope_parameters": _rope()},
        token2wav_config={"dit_config": _DIT, "bigvgan_config": _BIGVGAN},
        enable_audio_output=True,
    )


def _rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}


def _voices() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: {
            "bos_token": token,
            "cond": torch.randn(1, 32, generator=generator),
            "ref_mel": torch.randn(1, 30, 80, generator=generator),
        }
        for name, token in VOICES.items()
    }
