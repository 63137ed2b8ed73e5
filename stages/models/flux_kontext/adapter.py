"""FLUX.1 Kontext: `FluxKontextPipeline`, a picture drawn beside the image that it is to change."""

from __future__ import annotations

import torch
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion.adapter import Tensor
from omni_async.stages.diffusion.pictures import input_images
from omni_async.stages.diffusion.state import DiffusionState
from omni_async.stages.models.flux import adapter


class Adapter(adapter.Adapter):
    """FLUX with the image's tokens behind those of the picture."""

    vae_beside = True

    def begin(self, state: DiffusionState) -> None:
        """The picture's latents, those of the image, and the positions of both."""
        pipe, spec = self.pipe, state.spec
        image = self._image(state)
        latents, image_latents, ids, image_ids = pipe.prepare_latents(
            image,
            1,
            self.transformer.config.in_channels // 4,
            spec.height,
            spec.width,
            state.cond["embeds"].dtype,
            self.device,
            state.generator,
        )
        state.latents = latents
        state.context["ids"] = ids if image_ids is None else torch.cat([ids, image_ids])
        state.context["image"] = image_latents

    def _image(self, state: DiffusionState) -> Tensor | None:
        """The request's image at the nearest size that the model was trained with."""
        images = input_images(state.request.tensors)
        if not images:
            return None
        processor, step = self.pipe.image_processor, self.multiple_of
        height, width = processor.get_default_height_width(images[0])
        if not height or not width:
            raise InvalidRequest(f"The image must be at least {step}x{step} pixels.", param="image")
        ratio = width / height
        _, width, height = min((abs(ratio - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS)
        width, height = width // step * step, height // step * step
        return processor.preprocess(processor.resize(images[0], height, width), height, width)

    def inputs(self, state: DiffusionState) -> Tensor:
        """The picture's latents, then the image's."""
        image = state.context["image"]
        return state.latents[0] if image is None else torch.cat([state.latents, image], 1)[0]
