"""Z-Image: `ZImagePipeline`, whose transformer takes rows of any size by itself, and what it makes of an
image and a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.z_image.pipeline_z_image import get_default_z_image_sigmas

from omni_async.stages.diffusion import adapter, flow
from omni_async.stages.diffusion.adapter import Row, Tensor
from omni_async.stages.diffusion.inpainting import begin_from_image, keep_unmasked
from omni_async.stages.diffusion.state import DiffusionState, Encoding


class Adapter(adapter.Adapter):
    """Guided away from the negative prompt, from a scale of 0 on."""

    network = "ZImageTransformer2DModel"
    dispatches_attention = True
    guidance = "cond_first"
    scale_floor = 0.0
    default_scale = 5.0
    default_length = 512
    pads = True
    lora_per_row = False

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        self.multiple_of = pipe.vae_scale_factor * 2

    def encode_texts(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """`embeds` `[tokens, width]` of each text, without padding."""
        embeds, _ = self.pipe.encode_prompt(
            prompt=list(texts),
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.length_of(state.spec),
        )
        return [Encoding(embeds=row) for row in embeds]

    def prepare(self, state: DiffusionState) -> None:
        """Latents `[1, channels, height, width]`: float32 noise, or the request's image."""
        spec = state.spec
        state.generator = self.new_generator(state)
        state.scheduler = self.new_scheduler()
        tokens = (spec.height // self.multiple_of) * (spec.width // self.multiple_of)
        mu = flow.shift_of(state.scheduler.config, tokens)
        flow.set_timesteps(state, self.device, get_default_z_image_sigmas(spec.num_inference_steps), mu=mu)
        state.scheduler.set_begin_index(0)
        if "image0" in state.request.tensors:
            begin_from_image(self, state)
            return
        channels, size = self.transformer.in_channels, (spec.height, spec.width)
        state.latents = self.pipe.prepare_latents(
            1, channels, *size, torch.float32, self.device, state.generator
        )

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """The network's outputs, float `[1, channels, height, width]` each."""
        out = self.transformer(
            [state.latents[0].to(self.transformer.dtype).unsqueeze(1) for state, _ in rows],
            (1000 - torch.stack([state.timestep for state, _ in rows])) / 1000,
            [encoding["embeds"] for _, encoding in rows],
            joint_attention_kwargs=None,
            return_dict=False,
        )[0]
        return [row.float()[None].squeeze(2) for row in out]

    def guide(self, state: DiffusionState, cond: Tensor, uncond: Tensor) -> Tensor:
        """Beyond the prompt's prediction, away from the negative prompt's."""
        return cond + state.guidance * (cond - uncond)

    def finish_prediction(self, prediction: Tensor) -> Tensor:
        """The network points from noise to picture; the scheduler wants the other way."""
        return -prediction

    def step_scheduler(self, state: DiffusionState, prediction: Tensor) -> None:
        """As all families, and the image again where a mask protects it."""
        super().step_scheduler(state, prediction)
        keep_unmasked(state)

    def decode(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """Pictures, float `[rows, 3, height, width]`."""
        return self.vae_decode(self.unscaled(latents.to(self.pipe.vae.dtype)))
