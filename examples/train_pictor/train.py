"""Train the networks by flow matching: from noise to the latents of a captioned picture."""

from __future__ import annotations

import argparse
import copy
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from examples.train_pictor import captions
from examples.train_pictor.networks import Colours, Model

PEAK_RATE = 1.2e-3
PADDINGS = (16, 256, 256, 64)
"""Zero tokens behind the caption; clients may ask for several lengths, so several are trained."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=65.0)
    parser.add_argument("--steps", type=int, default=0, help="instead of minutes")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    things = captions.load_things(args.data)
    tokenizer = captions.train_tokenizer(things)
    model, losses = train(things, tokenizer, args)
    args.output.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), args.output / "model.safetensors")
    tokenizer.save_pretrained(args.output / "tokenizer")
    tenth = max(1, len(losses) // 10)
    print(f"{len(losses)} steps, loss {mean(losses[:tenth]):.3f} → {mean(losses[-tenth:]):.3f}")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def train(
    things: list[captions.Thing], tokenizer: Any, args: argparse.Namespace
) -> tuple[Model, list[float]]:
    """The averaged weights, and the loss of every step."""
    torch.manual_seed(0)
    rng, chosen = random.Random(1), captions.wanted(things)
    latents = Colours(captions.stacked(things)).encode(captions.stacked(chosen))
    model = Model(args.layers, max(4096, len(tokenizer)))
    average, optimizer, losses = copy.deepcopy(model), make_optimizer(model), list[float]()
    began = time.monotonic()
    while (done := progress(args, len(losses), began)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate(done, len(losses))
        rows = rng.sample(range(len(chosen)), min(args.batch, len(chosen)))
        ids = captions.ids_of(tokenizer, [captions.caption(chosen[row], rng) for row in rows])
        loss = loss_of(model, latents[rows], ids, PADDINGS[len(losses) % len(PADDINGS)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        blend(average, model, min(0.998, (len(losses) + 1) / (len(losses) + 10)))
    return average, losses


def progress(args: argparse.Namespace, step: int, began: float) -> float:
    """From 0 to 1."""
    return step / args.steps if args.steps else (time.monotonic() - began) / 60 / args.minutes


def rate(done: float, step: int) -> float:
    """A short rise, a plateau, and half a cosine to a fiftieth."""
    fall = 1.0 if done < 0.3 else 0.5 * (1 + math.cos(math.pi * (done - 0.3) / 0.7)) * 0.98 + 0.02
    return PEAK_RATE * min(1.0, (step + 1) / 150) * fall


def make_optimizer(model: Model) -> torch.optim.Optimizer:
    weights = list(model.parameters())
    groups = [
        {"params": [each for each in weights if each.dim() >= 2], "weight_decay": 0.01},
        {"params": [each for each in weights if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))


def loss_of(model: Model, latents: Tensor, ids: Tensor, padding: int) -> Tensor:
    """The mean square of the velocity's error, at times that favour the middle."""
    times = torch.sigmoid(torch.randn(len(latents)) + 0.4)
    uniform = len(latents) // 4
    times[:uniform] = torch.rand(uniform)
    noise, share = torch.randn_like(latents), times[:, None, None, None]
    velocity = model((1 - share) * latents + share * noise, times, ids, padding)
    return (velocity - (noise - latents)).pow(2).mean()


def blend(average: nn.Module, model: nn.Module, keep: float) -> None:
    """Move the average a little towards the model."""
    with torch.no_grad():
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            old.lerp_(new, 1 - keep)


if __name__ == "__main__":
    main()
