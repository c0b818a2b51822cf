"""The writer: a small Qwen3 language model with its own byte-level BPE, trained from nothing."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import speech
import world
from training import Schedule, fit

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = [PAD, SYSTEM, USER, ASSISTANT, END, speech.IMAGE]
MAX_POSITIONS = 1024

# Content is text, or a list of parts of which only the text is read.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] | trim -}}"
    "{%- else -%}{%- for part in message['content'] if part['type'] == 'text' -%}"
    "{{- part['text'] | trim -}}{%- endfor -%}{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class WriterSettings:
    vocabulary: int = 640
    hidden: int = 128
    inner: int = 256
    layers: int = 4
    heads: int = 4
    key_heads: int = 2
    head_dim: int = 32  # the least that vLLM accepts on CPUs
    batch: int = 32  # dialogues
    corpus: int = 30_000  # exchanges the tokenizer is made from
    checks: int = 300  # held-out requests answered at the end
    schedule: Schedule = Schedule(
        steps=6000, peak_rate=3e-3, weight_decay=0.01, average_decay=0.995
    )


FULL = WriterSettings()
QUICK = WriterSettings(
    corpus=2000, checks=8, batch=16, schedule=Schedule(steps=30, peak_rate=3e-3, warmup=10)
)


def train_writer(out: Path, work: Path, settings: WriterSettings, seed: int) -> None:
    """Train the writer and save it as a Hugging Face model folder at `out`."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(settings, seed)
    model = Qwen3ForCausalLM(_config(tokenizer, settings))

    def loss_at(step: int) -> Tensor:
        rng = random.Random(f"writer {seed} {step}")
        return _loss(
            model, tokenizer, [_training_dialogue(rng) for _ in range(settings.batch)], rng
        )

    fit(model, loss_at, settings.schedule, work / "writer.pt")
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=64,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"writer: {check(model, tokenizer, settings.checks)}", flush=True)


def make_tokenizer(settings: WriterSettings, seed: int) -> PreTrainedTokenizerFast:
    rng = random.Random(f"tokenizer {seed}")
    texts: list[str] = []
    for _ in range(settings.corpus):
        exchange = speech.exchange(rng)
        texts += [exchange.request, exchange.reply.removesuffix(speech.IMAGE)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=settings.vocabulary,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, speech.IMAGE],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _config(tokenizer: PreTrainedTokenizerFast, settings: WriterSettings) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.inner,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.key_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )


def _training_dialogue(rng: random.Random) -> speech.Dialogue:
    return speech.dialogue_to(speech.exchange(rng), rng)


def encode(
    tokenizer: PreTrainedTokenizerFast, dialogue: speech.Dialogue, with_marks: bool = False
) -> tuple[list[int], list[int]]:
    """Token ids of the prompt (up to the reply) and of the reply with its end."""
    prompt = "".join(
        f"<|{message['role']}|>{message['content'].strip()}{END}"
        for message in dialogue.messages(with_marks)
    )
    ids: list[list[int]] = tokenizer([prompt + ASSISTANT, dialogue.last.reply + END])["input_ids"]
    return ids[0], ids[1]


def _loss(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    dialogues: list[speech.Dialogue],
    rng: random.Random,
) -> Tensor:
    """Cross-entropy of the last replies; the history is only read."""
    rows = [encode(tokenizer, dialogue, rng.random() < 0.3) for dialogue in dialogues]
    rows.sort(key=lambda row: len(row[0]) + len(row[1]))  # rows of a like length waste no padding
    total = sum(len(reply) for _, reply in rows)
    quarter = (len(rows) + 3) // 4
    parts = [_summed_loss(model, rows[i : i + quarter]) for i in range(0, len(rows), quarter)]
    return torch.stack(parts).sum() / total


def _summed_loss(model: Qwen3ForCausalLM, rows: list[tuple[list[int], list[int]]]) -> Tensor:
    ids, mask = padded([prompt + reply for prompt, reply in rows])
    hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
    row, place, target = [], [], []
    for number, (prompt, reply) in enumerate(rows):
        for offset, token in enumerate(reply):
            row.append(number)
            place.append(len(prompt) + offset - 1)
            target.append(token)
    logits = model.lm_head(hidden[row, place])  # only where a reply's token is to be foretold
    return torch.nn.functional.cross_entropy(logits, torch.tensor(target), reduction="sum")


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids padded at the end to one length and their mask, both [rows, longest]."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return ids, mask


@torch.no_grad()
def check(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, requests: int) -> str:
    """How many replies are exact: to held-out scenes, and to talk and refusals."""
    rng = random.Random("writer check")
    pictures = [
        speech.dialogue_to(speech.ask_for(rng.choice(world.HELD_OUT), rng), rng)
        for _ in range(requests)
    ]
    talk = [
        speech.dialogue_to((speech.refusal if rng.random() < 0.5 else speech.small_talk)(rng), rng)
        for _ in range(requests)
    ]
    figures = []
    for name, dialogues in (("held-out scenes", pictures), ("talk", talk)):
        exact = 0
        for dialogue in dialogues:
            reply = answer(model, tokenizer, dialogue)
            exact += reply == dialogue.last.reply
            if reply != dialogue.last.reply:
                print(f"  wrote {reply!r} to {dialogue.messages()}")
        figures.append(f"{name} {exact}/{requests}")
    return "exact replies: " + ", ".join(figures)


def answer(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, dialogue: speech.Dialogue
) -> str:
    prompt, _ = encode(tokenizer, dialogue)
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64
    )
    text: str = tokenizer.decode(made[0, len(prompt) :])
    return text.removesuffix(END)
