"""Sana: `SanaPipeline`, at exactly the size asked for (its own call may bin sizes)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from omni_async.stages.diffusion import adapter, flow
from omni_async.stages.diffusion.adapter import Row, Tensor
from omni_async.stages.diffusion.state import DiffusionState, Encoding


class Adapter(adapter.Adapter):
    """The prompt follows an instruction to elaborate it; the negative prompt does not."""

    network = "SanaTransformer2DModel"
    guidance = "uncond_first"
    default_scale = 4.5
    default_length = 300

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        self.multiple_of = pipe.vae_scale_factor * pipe.transformer.config.patch_size
        parameters = inspect.signature(type(pipe).__call__).parameters
        self._instruction = parameters["complex_human_instruction"].default

    def encode_texts(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """`embeds` `[1, tokens, width]` and their `mask` `[1, tokens]`."""
        embeds, mask, _, _ = self._encode(texts, "", False, state)
        return _rows(embeds, mask)

    def encode_negatives(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """The same, without the instruction."""
        _, _, embeds, mask = self._encode(texts, list(texts), True, state)
        return _rows(embeds, mask)

    def _encode(
        self, texts: Sequence[str], negatives: Any, guided: bool, state: DiffusionState
    ) -> tuple[Any, Any, Any, Any]:
        return self.pipe.encode_prompt(
            list(texts),
            guided,
            negative_prompt=negatives,
            device=self.device,
            max_sequence_length=self.length_of(state.spec),
            complex_human_instruction=self._instruction,
        )

    def prepare(self, state: DiffusionState) -> None:
        """Latents `[1, channels, height, width]`, always float32."""
        state.generator = self.new_generator(state)
        state.scheduler = self.new_scheduler()
        flow.set_timesteps(state, self.device)
        channels, size = self.transformer.config.in_channels, (state.spec.height, state.spec.width)
        pipe = self.pipe_with(state.scheduler)
        state.latents = pipe.prepare_latents(1, channels, *size, torch.float32, self.device, state.generator)
        state.context["step"] = pipe.prepare_extra_step_kwargs(state.generator, 0.0)

    def step_arguments(self, state: DiffusionState) -> dict[str, Any]:
        """The generator, for schedulers that draw noise."""
        return state.context["step"]

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """The network's outputs, float `[1, channels, height, width]` each."""
        network, dtype = self.transformer, self.transformer.dtype
        times = torch.stack([state.timestep for state, _ in rows]).to(self.device)
        out = network(
            torch.cat([state.latents for state, _ in rows]).to(dtype),
            encoder_hidden_states=torch.cat([encoding["embeds"] for _, encoding in rows]).to(dtype),
            encoder_attention_mask=torch.cat([encoding["mask"] for _, encoding in rows]),
            timestep=times * network.config.timestep_scale,
            return_dict=False,
        )[0]
        return out.float().split(1)

    def finish_prediction(self, prediction: Tensor) -> Tensor:
        """Without the variance that some networks predict beside."""
        config = self.transformer.config
        both = config.out_channels // 2 == config.in_channels
        return prediction.chunk(2, dim=1)[0] if both else prediction

    def decode(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """Pictures, float `[rows, 3, height, width]`."""
        vae = self.pipe.vae
        return self.vae_decode(latents.to(vae.dtype) / vae.config.scaling_factor)


def _rows(embeds: Tensor, mask: Tensor) -> list[Encoding]:
    return [Encoding(embeds=e[None], mask=m[None]) for e, m in zip(embeds, mask, strict=True)]
