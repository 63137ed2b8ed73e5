"""Qwen-Image: `QwenImagePipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion import adapter, flow
from omni_async.stages.diffusion.adapter import Row, Tensor
from omni_async.stages.diffusion.forwarding import replace_forward
from omni_async.stages.diffusion.padding import pad_stack
from omni_async.stages.diffusion.spec import Spec
from omni_async.stages.diffusion.state import DiffusionState, Encoding
from omni_async.stages.models.qwen_image.attention import RowAttention, positions_by_row


class Adapter(adapter.Adapter):
    """The prompt and the negative prompt in two forward passes; texts and pictures of several lengths
    padded."""

    network = "QwenImageTransformer2DModel"
    dispatches_attention = True
    scale_name = "true_cfg_scale"
    default_scale = 4.0
    default_negative = " "
    default_length = 512
    pads = True

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        self.multiple_of = pipe.vae_scale_factor * 2
        self._attention = RowAttention()
        pipe.transformer.set_attn_processor(self._attention)
        embed = pipe.transformer.pos_embed
        replace_forward(embed, positions_by_row(embed.forward))

    def check(self, spec: Spec) -> None:
        """One step alone has no size of step: the shift to a terminal sigma divides by it."""
        super().check(spec)
        if spec.num_inference_steps < 2 and self.pipe.scheduler.config.get("shift_terminal"):
            message = "num_inference_steps must be at least 2 for this model."
            raise InvalidRequest(message, param="num_inference_steps")

    def encode_texts(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """`embeds` `[tokens, width]` of each text, without padding."""
        embeds, mask = self.pipe.encode_prompt(
            prompt=list(texts), device=self.device, max_sequence_length=self.length_of(state.spec)
        )
        if mask is None:
            return [Encoding(embeds=row) for row in embeds]
        return [Encoding(embeds=row[kept.bool()]) for row, kept in zip(embeds, mask, strict=True)]

    def prepare(self, state: DiffusionState) -> None:
        """Packed latents `[1, patches, channels]`."""
        state.generator = self.new_generator(state)
        state.latents = self.noise(state)
        state.context["shapes"] = [self.grid(state.spec.height, state.spec.width)]
        self.schedule(state)

    def noise(self, state: DiffusionState) -> Tensor:
        """Packed noise."""
        channels, dtype = self.transformer.config.in_channels // 4, state.cond["embeds"].dtype
        size = (state.spec.height, state.spec.width)
        return self.pipe.prepare_latents(1, channels, *size, dtype, self.device, state.generator)

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Frames, rows and columns of patches."""
        return 1, height // self.multiple_of, width // self.multiple_of

    def schedule(self, state: DiffusionState) -> None:
        """Sigmas shifted by the number of patches."""
        state.scheduler = self.new_scheduler()
        mu = flow.shift_of(state.scheduler.config, state.latents.shape[1])
        flow.set_timesteps(state, self.device, flow.linear_sigmas(state.spec.num_inference_steps), mu=mu)
        state.scheduler.set_begin_index(0)

    def inputs(self, state: DiffusionState) -> Tensor:
        """What the transformer sees of a request, `[tokens, channels]`."""
        return state.latents[0]

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Predicted velocities, `[1, patches, channels]` each."""
        states = [state for state, _ in rows]
        texts, text_mask = pad_stack([encoding["embeds"] for _, encoding in rows])
        pictures, self._attention.image_mask = pad_stack([self.inputs(state) for state in states])
        try:
            out = self.transformer(
                hidden_states=pictures,
                timestep=torch.stack([state.timestep for state in states]).to(pictures.dtype) / 1000,
                guidance=self._guidance(states),
                encoder_hidden_states_mask=text_mask,
                encoder_hidden_states=texts,
                img_shapes=[state.context["shapes"] for state in states],
                attention_kwargs={},
                return_dict=False,
            )[0]
        finally:
            self._attention.image_mask = None
        return [row[None, : state.latents.shape[1]] for row, state in zip(out, states, strict=True)]

    def _guidance(self, states: Sequence[DiffusionState]) -> Tensor | None:
        if not self.transformer.config.guidance_embeds:
            return None
        scales = [state.spec.guidance_scale or 1.0 for state in states]
        return torch.tensor(scales, device=self.device, dtype=torch.float32)

    def guide(self, state: DiffusionState, cond: Tensor, uncond: Tensor) -> Tensor:
        """Guidance that keeps the length of the prompt's prediction."""
        combined = super().guide(state, cond, uncond)
        length, own = (torch.norm(each, dim=-1, keepdim=True) for each in (cond, combined))
        return combined * (length / own)

    def spatial(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """The latents unpacked."""
        spec = state.spec
        return self.pipe._unpack_latents(latents, spec.height, spec.width, self.pipe.vae_scale_factor)[
            :, :, 0
        ]

    def decode(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """Pictures, float `[rows, 3, height, width]`."""
        pipe, vae, spec = self.pipe, self.pipe.vae, state.spec
        latents = pipe._unpack_latents(latents, spec.height, spec.width, pipe.vae_scale_factor)
        latents = latents.to(vae.device, vae.dtype)
        mean, deviation = (
            torch.tensor(each).view(1, vae.config.z_dim, 1, 1, 1).to(latents)
            for each in (vae.config.latents_mean, vae.config.latents_std)
        )
        pictures = vae.decode(latents / (1.0 / deviation) + mean, return_dict=False)[0][:, :, 0]
        return pipe.image_processor.postprocess(pictures, output_type="pt")
