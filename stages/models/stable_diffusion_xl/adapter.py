"""Stable Diffusion XL: `StableDiffusionXLPipeline`, a U-Net under any scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omni_async.stages.diffusion import adapter, flow
from omni_async.stages.diffusion.adapter import Row, Tensor
from omni_async.stages.diffusion.spec import Spec
from omni_async.stages.diffusion.state import DiffusionState, Encoding


class Adapter(adapter.Adapter):
    """Without a negative prompt a guided request is guided by zeros, where the model asks for that."""

    network = "UNet2DConditionModel"
    guidance = "uncond_first"
    default_scale = 5.0
    denoiser = "unet"
    multiple_of = 8

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        self.multiple_of = pipe.vae_scale_factor
        if pipe.vae.dtype == torch.float16 and pipe.vae.config.force_upcast:
            pipe.vae.to(dtype=torch.float32)

    def is_guided(self, spec: Spec) -> bool:
        """A network that takes the scale as an input is not guided by a second row."""
        return super().is_guided(spec) and self.transformer.config.time_cond_proj_dim is None

    def encode_texts(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """`embeds` `[1, 77, width]` and `pooled` `[1, width]` of each text."""
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompt=list(texts), device=self.device, do_classifier_free_guidance=False
        )
        return [Encoding(embeds=e[None], pooled=p[None]) for e, p in zip(embeds, pooled, strict=True)]

    def prepare(self, state: DiffusionState) -> None:
        """Latents `[1, channels, height, width]`, at the scheduler's own scale of noise."""
        spec, unet = state.spec, self.transformer
        unsaid = state.uncond is not None and spec.negative_prompt is None
        if unsaid and self.pipe.config.force_zeros_for_empty_prompt:
            state.uncond = Encoding({name: torch.zeros_like(each) for name, each in state.cond.items()})
        state.generator = self.new_generator(state)
        state.scheduler = self.new_scheduler()
        flow.set_timesteps(state, self.device)
        pipe, dtype = self.pipe_with(state.scheduler), state.cond["embeds"].dtype
        size = (spec.height, spec.width)
        state.latents = pipe.prepare_latents(
            1, unet.config.in_channels, *size, dtype, self.device, state.generator
        )
        state.context["step"] = pipe.prepare_extra_step_kwargs(state.generator, 0.0)
        state.context["time_ids"] = pipe._get_add_time_ids(
            size,
            (0, 0),
            size,
            dtype=dtype,
            text_encoder_projection_dim=int(state.cond["pooled"].shape[-1]),
        ).to(self.device)
        if hasattr(state.scheduler, "set_begin_index"):
            state.scheduler.set_begin_index(0)

    def step_arguments(self, state: DiffusionState) -> dict[str, Any]:
        """The generator, for schedulers that draw noise."""
        return state.context["step"]

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Predicted noise, `[1, channels, height, width]` each."""
        inputs = [state.scheduler.scale_model_input(state.latents, state.timestep) for state, _ in rows]
        return self.transformer(
            torch.cat(inputs),
            torch.stack([state.timestep for state, _ in rows]),
            encoder_hidden_states=torch.cat([encoding["embeds"] for _, encoding in rows]),
            timestep_cond=self._scales([state for state, _ in rows], inputs[0].dtype),
            added_cond_kwargs={
                "text_embeds": torch.cat([encoding["pooled"] for _, encoding in rows]),
                "time_ids": torch.cat([state.context["time_ids"] for state, _ in rows]),
            },
            return_dict=False,
        )[0].split(1)

    def _scales(self, states: Sequence[DiffusionState], dtype: torch.dtype) -> Tensor | None:
        width = self.transformer.config.time_cond_proj_dim
        if width is None:
            return None
        scales = torch.tensor([state.guidance - 1 for state in states])
        return self.pipe.get_guidance_scale_embedding(scales, embedding_dim=width).to(self.device, dtype)

    def decode(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """Pictures, float `[rows, 3, height, width]`."""
        config = self.pipe.vae.config
        if config.force_upcast:
            latents = latents.to(self.pipe.vae.dtype)
        mean, deviation = config.get("latents_mean"), config.get("latents_std")
        if mean is None or deviation is None:
            return self.vae_decode(latents / config.scaling_factor)
        mean, deviation = (torch.tensor(each).view(1, -1, 1, 1).to(latents) for each in (mean, deviation))
        return self.vae_decode(latents * deviation / config.scaling_factor + mean)
