"""Pictures on their way into a pipeline and out of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image


def input_images(tensors: Any) -> list[Image.Image]:
    """The request's images, in order, as RGB."""
    names = sorted((name for name in tensors if name.startswith("image")), key=lambda name: int(name[5:]))
    return [Image.fromarray(np.asarray(tensors[name])).convert("RGB") for name in names]


def input_mask(tensors: Any) -> Image.Image | None:
    """The mask, white where the image is to be changed; None where the whole image is."""
    return Image.fromarray(np.asarray(tensors["mask"])) if "mask" in tensors else None


def resized(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """uint8 `[height, width, channels]` at (width, height), by Lanczos' filter."""
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))


class LatentColours:
    """A linear map from latent channels to colours: a preview that costs next to nothing.

    It is fitted once, by least squares, to what the decoder makes of `latents` (`[rows, channels, height,
    width]`) and `pictures` (float `[rows, 3, height × n, width × n]` in [0, 1]).
    """

    def __init__(self, latents: torch.Tensor, pictures: torch.Tensor) -> None:
        small = torch.nn.functional.adaptive_avg_pool2d(
            pictures.float(), (latents.shape[-2], latents.shape[-1])
        )
        inputs = latents.float().movedim(1, -1).flatten(0, -2)
        inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
        self._map = torch.linalg.lstsq(inputs.cpu(), small.movedim(1, -1).flatten(0, -2).cpu()).solution

    def __call__(self, latents: torch.Tensor) -> NDArray[np.uint8]:
        """`[1, channels, height, width]` → uint8 `[height, width, 3]`."""
        inputs = latents[0].float().movedim(0, -1).cpu()
        inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)
        return ((inputs @ self._map).clamp(0, 1) * 255).round().to(torch.uint8).numpy()
