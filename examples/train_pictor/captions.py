"""Captions of things, and the tokenizer that reads them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.train_pictor.networks import LENGTH

SPECIAL = ["<pad>", "<s>", "<unk>", "</s>"]
ASKING = (
    r"\b(please |draw |generate |create |make |show )*(me )?(a |an |the )?(nice |simple )?"
    r"(photo|photograph|picture|image|drawing|illustration|icon|painting|sketch) (of|showing) "
)


@dataclass(frozen=True)
class Thing:
    """A name, other words for it, and its picture, float `[3, 32, 32]` in [-1, 1]."""

    label: str
    tags: list[str]
    picture: Tensor


def load_things(data: Path) -> list[Thing]:
    """All named pictures."""
    pictures = load_file(data / "pictures.safetensors")["pictures"].permute(0, 3, 1, 2).float() / 127.5 - 1
    names = json.loads((data / "names.json").read_text(encoding="utf-8"))
    return [
        Thing(each["label"], each["tags"], picture) for each, picture in zip(names, pictures, strict=True)
    ]


def wanted(things: list[Thing]) -> list[Thing]:
    """Those of `things.txt`, in its order."""
    by_label = {thing.label: thing for thing in things}
    lines = (Path(__file__).parent / "things.txt").read_text(encoding="utf-8").splitlines()
    return [by_label[line] for line in lines if line in by_label]


def caption(thing: Thing, rng: random.Random) -> str:
    """Mostly the name; often other words; sometimes nothing, for guidance."""
    draw = rng.random()
    if draw < 0.08:
        return ""
    if draw < 0.68 or not thing.tags:
        return f"cute {thing.label}" if rng.random() < 0.15 else thing.label
    words = rng.sample(thing.tags, min(len(thing.tags), rng.randint(1, 4)))
    if draw < 0.86:
        words.insert(rng.choice([0, len(words)]), thing.label)
    return " ".join(words)


def train_tokenizer(things: list[Thing], size: int = 4096) -> Any:
    """Byte pairs over the names and words; articles and ways of asking are dropped."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Lowercase(),
            normalizers.StripAccents(),
            normalizers.Replace(Regex(r"[^a-z0-9' -]"), " "),
            normalizers.Replace(Regex(ASKING), ""),
            normalizers.Replace(Regex(r"\b(a|an|the|of)\b"), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    corpus = [text for thing in things for text in ([thing.label] * 20 + thing.tags * 5)]
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789'-")
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=SPECIAL, end_of_word_suffix="</w>", initial_alphabet=letters
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A $B </s>",
        special_tokens=[("<s>", SPECIAL.index("<s>")), ("</s>", SPECIAL.index("</s>"))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=LENGTH,
        padding_side="right",
    )


def ids_of(tokenizer: Any, texts: list[str]) -> Tensor:
    """Token ids `[rows, LENGTH]`."""
    return tokenizer(
        texts, padding="max_length", max_length=LENGTH, truncation=True, return_tensors="pt"
    ).input_ids


def stacked(things: list[Thing]) -> Tensor:
    """Their pictures, `[n, 3, 32, 32]`."""
    return torch.stack([thing.picture for thing in things])
