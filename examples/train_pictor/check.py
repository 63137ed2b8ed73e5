"""Draw every thing, and count those that are nearest to their own picture among all of the font's."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from torch import Tensor
from torch.nn.functional import avg_pool2d

from examples.train_pictor import captions

BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    things = captions.load_things(args.data)
    chosen = captions.wanted(things)
    pipe = StableDiffusion3Pipeline.from_pretrained(args.weights, dtype=torch.float32)
    drawn = draw(pipe, [thing.label for thing in chosen], args.steps)
    found = [things[index] for index in nearest(drawn, captions.stacked(things))]
    right = sum(map(looks_like, found, chosen))
    print(f"{right} of {len(chosen)} are nearest to their own picture among {len(things)}")


def draw(pipe: Any, prompts: list[str], steps: int) -> Tensor:
    """Pictures `[n, 3, 32, 32]` in [-1, 1]."""
    pipe.set_progress_bar_config(disable=True)
    parts: list[Tensor] = []
    for begin in range(0, len(prompts), BATCH):
        made = pipe(
            prompts[begin : begin + BATCH],
            num_inference_steps=steps,
            guidance_scale=2.5,
            max_sequence_length=16,
            generator=torch.Generator().manual_seed(begin),
            output_type="pt",
        ).images
        parts.append(avg_pool2d(made.float(), made.shape[-1] // 32) * 2 - 1)
    return torch.cat(parts)


def nearest(drawn: Tensor, pictures: Tensor) -> list[int]:
    """For each drawn picture, the index of the picture with the smallest mean square difference."""
    return torch.cdist(drawn.flatten(1), pictures.flatten(1)).argmin(1).tolist()


def looks_like(found: captions.Thing, thing: captions.Thing) -> bool:
    """Whether both have the same picture: some flags of a font are the same, down to the pixel."""
    return torch.equal(found.picture, thing.picture)


if __name__ == "__main__":
    main()
