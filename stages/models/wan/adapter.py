"""Wan: `WanPipeline`, films and single pictures from text; both experts of Wan 2.2."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from omni_async.errors import ConfigError, InvalidRequest
from omni_async.stages.diffusion import adapter
from omni_async.stages.diffusion.adapter import Row, Tensor
from omni_async.stages.diffusion.spec import Spec
from omni_async.stages.diffusion.state import DiffusionState, Encoding


class Adapter(adapter.Adapter):
    """Latents are `[1, channels, frames, height, width]`."""

    network = "WanTransformer3DModel"
    dispatches_attention = True
    default_scale = 5.0
    default_length = 512

    def __init__(self, pipe: Any) -> None:
        if pipe.transformer is None or (pipe.config.boundary_ratio is not None) != (
            pipe.transformer_2 is not None
        ):
            raise ConfigError("Wan runs with one network, or with two and the boundary between them.")
        super().__init__(pipe)
        self.multiple_of = pipe.vae_scale_factor_spatial * pipe.transformer.config.patch_size[1]
        ratio = pipe.config.boundary_ratio
        self._boundary = None if ratio is None else ratio * pipe.scheduler.config.num_train_timesteps
        if ratio is not None:
            self.no_lora = "a LoRA changes one of this model's two networks"

    @property
    def networks(self) -> list[Any]:
        """Both experts."""
        return [each for each in (self.pipe.transformer, self.pipe.transformer_2) if each is not None]

    def check(self, spec: Spec) -> None:
        """The VAE makes one frame, and then several a latent; previews are of single pictures."""
        super().check(spec)
        every = self.pipe.vae_scale_factor_temporal
        if spec.num_frames < 1 or spec.num_frames % every != 1 % every:
            near = max(spec.num_frames, 0) // every * every + 1
            message = f"num_frames must be a multiple of {every} and 1 more; the nearest is {near}."
            raise InvalidRequest(message, param="num_frames")
        if spec.partial_images and spec.num_frames > 1:
            raise InvalidRequest("A film has no previews.", param="partial_images")

    def encode_texts(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """`embeds` `[1, tokens, width]` of each text."""
        embeds, _ = self.pipe.encode_prompt(
            prompt=list(texts),
            do_classifier_free_guidance=False,
            max_sequence_length=self.length_of(state.spec),
            device=self.device,
        )
        return [Encoding(embeds=row[None].to(self.transformer.dtype)) for row in embeds]

    def prepare(self, state: DiffusionState) -> None:
        """Float32 latents, whatever the weights are."""
        spec = state.spec
        state.generator = self.new_generator(state)
        state.scheduler = self.new_scheduler()
        state.scheduler.set_timesteps(spec.num_inference_steps, device=self.device)
        state.timesteps, state.index = list(state.scheduler.timesteps), 0
        size = (spec.height, spec.width, spec.num_frames)
        state.latents = self.pipe.prepare_latents(
            1, self.transformer.config.in_channels, *size, torch.float32, self.device, state.generator
        )
        state.scheduler.set_begin_index(0)

    def _expert(self, state: DiffusionState) -> Any:
        early = self._boundary is None or bool(state.timestep >= self._boundary)
        return self.pipe.transformer if early else self.pipe.transformer_2

    def group(self, state: DiffusionState) -> tuple[Hashable, ...]:
        """Requests that are with the same expert."""
        if self._boundary is None or state.denoised:
            return ()
        return (bool(state.timestep >= self._boundary),)

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Predicted velocities, `[1, channels, frames, height, width]` each."""
        times = torch.stack([state.timestep for state, _ in rows])
        latents = torch.cat([state.latents for state, _ in rows])
        if self.pipe.config.expand_timesteps:
            frames, height, width = latents.shape[2:]
            times = times[:, None].expand(-1, frames * (height // 2) * (width // 2))
        return self._expert(rows[0][0])(
            hidden_states=latents.to(self.transformer.dtype),
            timestep=times,
            encoder_hidden_states=torch.cat([encoding["embeds"] for _, encoding in rows]),
            attention_kwargs=None,
            return_dict=False,
        )[0].split(1)

    def spatial(self, latents: Tensor, state: DiffusionState) -> Tensor | None:
        """The latents of a single picture."""
        return latents[:, :, 0] if state.spec.num_frames == 1 else None

    def post_decode(self, latents: Tensor, state: DiffusionState) -> NDArray[Any]:
        """uint8 `[rows, frames, height, width, 3]`, without the frames' dimension for pictures."""
        vae = self.pipe.vae
        latents = latents.to(vae.device, vae.dtype)
        mean, deviation = (
            torch.tensor(each).view(1, vae.config.z_dim, 1, 1, 1).to(latents)
            for each in (vae.config.latents_mean, vae.config.latents_std)
        )
        film = vae.decode(latents / (1.0 / deviation) + mean, return_dict=False)[0]
        frames = self.pipe.video_processor.postprocess_video(film, output_type="np")
        pixels = (frames * 255).round().astype("uint8")
        return pixels[:, 0] if state.spec.num_frames == 1 else pixels
