"""Qwen-Image-Edit: `QwenImageEditPipeline`, which sees the image in the prompt and beside the picture."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion.adapter import Tensor
from omni_async.stages.diffusion.pictures import input_images
from omni_async.stages.diffusion.state import DiffusionState, Encoding
from omni_async.stages.models.qwen_image import adapter
from omni_async.stages.models.qwen_image_edit import processor

IMAGE_AREA = 1024 * 1024


class Adapter(adapter.Adapter):
    """Qwen-Image with the image's tokens behind those of the picture."""

    vae_beside = True

    needs_image = True

    def media_key(self, state: DiffusionState) -> Hashable:
        """The image."""
        image = state.request.tensors.get("image0")
        if image is None:
            raise InvalidRequest("This model changes images and needs one.", param="image")
        return (image.shape, hashlib.sha256(image.tobytes()).digest())

    def _image(self, state: DiffusionState) -> tuple[Any, int, int]:
        """The image at about a megapixel, with its height and width."""
        image = input_images(state.request.tensors)[0]
        width, height, _ = calculate_dimensions(IMAGE_AREA, image.width / image.height)
        return self.pipe.image_processor.resize(image, height, width), height, width

    def encode_texts(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """`embeds` `[tokens, width]` of each text with the image; one by one, as each has an image."""
        image, _, _ = self._image(state)
        encodings: list[Encoding] = []
        for text in texts:
            embeds, mask = self.pipe.encode_prompt(
                prompt=text,
                image=image,
                device=self.device,
                max_sequence_length=self.length_of(state.spec),
            )
            kept = embeds[0] if mask is None else embeds[0][mask[0].bool()]
            encodings.append(Encoding(embeds=kept))
        return encodings

    def prepare(self, state: DiffusionState) -> None:
        """Packed latents of the picture and of the image."""
        spec, pipe = state.spec, self.pipe
        state.generator = self.new_generator(state)
        image, height, width = self._image(state)
        pixels = pipe.image_processor.preprocess(image, height, width).unsqueeze(2)
        state.latents, state.context["image"] = pipe.prepare_latents(
            pixels,
            1,
            self.transformer.config.in_channels // 4,
            spec.height,
            spec.width,
            state.cond["embeds"].dtype,
            self.device,
            state.generator,
        )
        state.context["shapes"] = [self.grid(spec.height, spec.width), self.grid(height, width)]
        self.schedule(state)

    def inputs(self, state: DiffusionState) -> Tensor:
        """The picture's latents, then the image's."""
        return torch.cat([state.latents, state.context["image"]], 1)[0]


def components(folder: Path) -> dict[str, Any]:
    """A processor that needs no torchvision, where there is none."""
    return {} if find_spec("torchvision") else {"processor": processor.load(folder)}
