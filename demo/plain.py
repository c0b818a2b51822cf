"""The demo model by plain scripts: transformers writes, diffusers paints, nothing between them.

This is the reference that the server's answers are held against.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import ZImagePipeline
from PIL import Image
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SHAPES = Path(__file__).resolve().parent.parent / "omni_rt" / "demo" / "shapes"
IMAGE = "<|image|>"
LAYER = -2  # of `hidden_states`: what the last layer is given
STEPS = 10
SIZE = 128  # pixels, both sides
MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Model:
    tokenizer: PreTrainedTokenizerFast
    writer: PreTrainedModel
    painter: ZImagePipeline

    def reply(self, request: str | list[dict[str, str]]) -> tuple[str, list[int], Tensor]:
        """Answer a request, or the last of a list of messages, by the likeliest token each time.

        Returns the text without the image and end tokens; the reply's token ids with them; and the
        hidden states [T, hidden] of the reply's tokens up to and with the image token, or [0,
        hidden] when there is to be no picture.
        """
        messages = [{"role": "user", "content": request}] if isinstance(request, str) else request
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        start = prompt["input_ids"].shape[1]
        with torch.no_grad():
            ids = self.writer.generate(**prompt, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
            # Once more, whole: generation keeps no state for its last token.
            states = self.writer(input_ids=ids, output_hidden_states=True).hidden_states[LAYER]
        written: list[int] = ids[0, start:].tolist()
        image = self.tokenizer.convert_tokens_to_ids(IMAGE)
        length = written.index(image) + 1 if image in written else 0
        text: str = self.tokenizer.decode(written, skip_special_tokens=True)
        return text, written, states[0, start : start + length].float()

    def paint(self, hidden: Tensor, seed: int) -> Image.Image:
        """The picture told by the hidden states [T, hidden] of one reply."""
        return self.paint_all([hidden], [seed])[0]

    def paint_all(self, hidden: Sequence[Tensor], seeds: Sequence[int]) -> list[Image.Image]:
        """Several at once; equal to one at a time but for rounding."""
        pictures: list[Image.Image] = self.painter(
            prompt_embeds=list(hidden),
            negative_prompt_embeds=[],
            guidance_scale=0.0,
            num_inference_steps=STEPS,
            height=SIZE,
            width=SIZE,
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
            output_type="pil",
        ).images
        return pictures


def load(folder: Path = SHAPES) -> Model:
    painter = ZImagePipeline.from_pretrained(
        folder / "painter", text_encoder=None, tokenizer=None, dtype=torch.float32
    )
    painter.set_progress_bar_config(disable=True)
    writer = AutoModelForCausalLM.from_pretrained(folder / "writer", dtype=torch.float32)
    return Model(AutoTokenizer.from_pretrained(folder / "writer"), writer.eval(), painter)
