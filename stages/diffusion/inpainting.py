"""Beginning from an image instead of noise, and keeping what a mask protects.

For pipelines whose latents are `[1, channels, height, width]` and whose scheduler matches flows; as
diffusers' image-to-image and inpainting pipelines of the same families do it.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3_img2img import retrieve_latents
from diffusers.utils.torch_utils import randn_tensor

from omni_async.stages.diffusion.adapter import Adapter
from omni_async.stages.diffusion.flow import skip_to_strength
from omni_async.stages.diffusion.pictures import input_images, input_mask
from omni_async.stages.diffusion.state import DiffusionState

Tensor = torch.Tensor


def begin_from_image(adapter: Adapter, state: DiffusionState) -> None:
    """Latents of the request's image with the noise of its first step; call after `set_timesteps`."""
    spec, vae = state.spec, adapter.pipe.vae
    pixels = adapter.pipe.image_processor.preprocess(
        input_images(state.request.tensors)[0], height=spec.height, width=spec.width
    )
    skip_to_strength(state)
    encoded = retrieve_latents(vae.encode(pixels.to(vae.device, vae.dtype)), generator=state.generator)
    image = (encoded - vae.config.shift_factor) * vae.config.scaling_factor
    noise = randn_tensor(image.shape, generator=state.generator, device=adapter.device, dtype=image.dtype)
    image = image.to(adapter.device)
    state.latents = state.scheduler.scale_noise(image, state.timesteps[0][None], noise)
    mask = input_mask(state.request.tensors)
    if mask is not None:
        state.context |= {"image": image, "noise": noise, "mask": _mask(mask, image, spec.height, spec.width)}


def _mask(mask: Any, image: Tensor, height: int, width: int) -> Tensor:
    processor = VaeImageProcessor(do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    pixels = processor.preprocess(mask, height=height, width=width)
    return torch.nn.functional.interpolate(pixels, size=image.shape[-2:]).to(image)


def keep_unmasked(state: DiffusionState) -> None:
    """Put the image back where the mask protects it; call after the scheduler's step."""
    if "mask" not in state.context:
        return
    mask, image = state.context["mask"], state.context["image"]
    if not state.denoised:
        image = state.scheduler.scale_noise(image, state.timestep[None], state.context["noise"])
    state.latents = (1 - mask) * image + mask * state.latents
