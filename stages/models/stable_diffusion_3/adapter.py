"""Stable Diffusion 3 and 3.5: `StableDiffusion3Pipeline`, and what it makes of an image and a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion import adapter, flow
from omni_async.stages.diffusion.adapter import Row, Tensor
from omni_async.stages.diffusion.forwarding import replace_forward
from omni_async.stages.diffusion.inpainting import begin_from_image, keep_unmasked
from omni_async.stages.diffusion.padding import KeyMask
from omni_async.stages.diffusion.spec import Spec
from omni_async.stages.diffusion.state import DiffusionState, Encoding


class Adapter(adapter.Adapter):
    """Both rows of a guided request in one forward pass; several sizes padded to the largest."""

    network = "SD3Transformer2DModel"
    guidance = "uncond_first"
    default_scale = 7.0
    pads = True

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        self.patch = pipe.transformer.config.patch_size
        self.multiple_of = pipe.vae_scale_factor * self.patch
        self._sizes: list[tuple[int, int]] = []
        self._embed = replace_forward(pipe.transformer.pos_embed, self._embed_sizes)

    def check(self, spec: Spec) -> None:
        """No larger than the network has positions for."""
        super().check(spec)
        most = self.transformer.config.pos_embed_max_size * self.multiple_of
        if max(spec.width, spec.height) > most:
            message = f"This model makes pictures of at most {most}x{most}."
            raise InvalidRequest(message, param="size", code="unsupported_size")

    def encode_texts(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """`embeds` `[1, tokens, width]` and `pooled` `[1, width]` of each text."""
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompt=list(texts),
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=self.length_of(state.spec),
        )
        return [Encoding(embeds=e[None], pooled=p[None]) for e, p in zip(embeds, pooled, strict=True)]

    def prepare(self, state: DiffusionState) -> None:
        """Latents `[1, channels, height, width]`, of noise or of the request's image."""
        pipe, spec = self.pipe, state.spec
        state.generator = self.new_generator(state)
        state.scheduler = self.new_scheduler()
        arguments = {}
        if state.scheduler.config.get("use_dynamic_shifting"):
            tokens = (spec.height // self.multiple_of) * (spec.width // self.multiple_of)
            arguments["mu"] = flow.shift_of(state.scheduler.config, tokens, max_shift=1.16)
        flow.set_timesteps(state, self.device, **arguments)
        if "image0" in state.request.tensors:
            begin_from_image(self, state)
            if "image" in state.context:
                # As the library's inpainting lays it out; the VAE's bits depend on that.
                state.context["image"] = state.context["image"].contiguous()
            return
        channels, dtype = pipe.transformer.config.in_channels, state.cond["embeds"].dtype
        size = (spec.height, spec.width)
        state.latents = pipe.prepare_latents(1, channels, *size, dtype, self.device, state.generator)

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Predicted velocities, `[1, channels, height, width]` each."""
        sizes = [tuple(state.latents.shape[-2:]) for state, _ in rows]
        high, wide = (max(size[axis] for size in sizes) for axis in (0, 1))
        latents = [
            pad(state.latents, (0, wide - w, 0, high - h))
            for (state, _), (h, w) in zip(rows, sizes, strict=True)
        ]
        arguments = {
            "hidden_states": torch.cat(latents),
            "timestep": torch.stack([state.timestep for state, _ in rows]),
            "encoder_hidden_states": torch.cat([encoding["embeds"] for _, encoding in rows]),
            "pooled_projections": torch.cat([encoding["pooled"] for _, encoding in rows]),
            "return_dict": False,
        }
        if len(set(sizes)) == 1:
            return self.transformer(**arguments)[0].split(1)
        self._sizes = sizes
        try:
            with KeyMask(*self._masks(sizes, high, wide, arguments["encoder_hidden_states"])):
                out = self.transformer(**arguments)[0]
        finally:
            self._sizes = []
        return [row[None, :, :h, :w] for row, (h, w) in zip(out, sizes, strict=True)]

    def _masks(self, sizes: list[tuple[int, int]], high: int, wide: int, texts: Tensor) -> tuple[Tensor, ...]:
        """What is no padding: among the patches, and among patches and text together."""
        patch = self.patch
        patches = torch.zeros(len(sizes), high // patch, wide // patch, dtype=torch.bool, device=texts.device)
        for mask, (height, width) in zip(patches, sizes, strict=True):
            mask[: height // patch, : width // patch] = True
        alone = patches.flatten(1)
        return alone, torch.cat([alone, alone.new_ones(texts.shape[:2])], 1)

    def _embed_sizes(self, latents: Tensor) -> Tensor:
        """The patch embedding, each row's positions cropped to its own size."""
        if not self._sizes:
            return self._embed(latents)
        embed, patch = self.transformer.pos_embed, self.patch
        high, wide = latents.shape[-2] // patch, latents.shape[-1] // patch
        patches = embed.proj(latents).flatten(2).transpose(1, 2)
        positions = patches.new_zeros(len(self._sizes), high, wide, patches.shape[-1])
        for row, (height, width) in zip(positions, self._sizes, strict=True):
            own = embed.cropped_pos_embed(height, width)
            row[: height // patch, : width // patch] = own.reshape(height // patch, width // patch, -1)
        return patches + positions.flatten(1, 2)

    def step_scheduler(self, state: DiffusionState, prediction: Tensor) -> None:
        """As all families, and the image again where a mask protects it."""
        super().step_scheduler(state, prediction)
        keep_unmasked(state)

    def decode(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """Pictures, float `[rows, 3, height, width]`."""
        return self.vae_decode(self.unscaled(latents))
