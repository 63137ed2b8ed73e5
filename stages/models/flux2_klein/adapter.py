"""FLUX.2 Klein: `Flux2KleinPipeline`, from a prompt and up to four images."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion import adapter, flow
from omni_async.stages.diffusion.adapter import Row, Tensor
from omni_async.stages.diffusion.pictures import input_images
from omni_async.stages.diffusion.spec import Spec
from omni_async.stages.diffusion.state import DiffusionState, Encoding

MOST_PIXELS = 1024 * 1024


class Adapter(adapter.Adapter):
    """Guided against the empty prompt, unless the model is distilled."""

    network = "Flux2Transformer2DModel"
    dispatches_attention = True
    vae_beside = True

    default_scale = 4.0
    default_length = 512

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        self.multiple_of = pipe.vae_scale_factor * 2

    def check(self, spec: Spec) -> None:
        """A distilled model takes no guidance scale."""
        super().check(spec)
        if spec.guidance_scale is not None and self.pipe.config.is_distilled:
            message = "guidance_scale has no effect on this model: it is distilled."
            raise InvalidRequest(message, param="guidance_scale")

    def is_guided(self, spec: Spec) -> bool:
        """A distilled model is not."""
        return super().is_guided(spec) and not self.pipe.config.is_distilled

    def encode_texts(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """`embeds` `[1, tokens, width]` and the positions `ids` `[1, tokens, 4]`."""
        embeds, ids = self.pipe.encode_prompt(
            prompt=list(texts), device=self.device, max_sequence_length=self.length_of(state.spec)
        )
        return [Encoding(embeds=e[None], ids=i[None]) for e, i in zip(embeds, ids, strict=True)]

    def prepare(self, state: DiffusionState) -> None:
        """Packed latents `[1, patches, channels]`, those of the images, and their positions."""
        pipe, spec = self.pipe, state.spec
        state.generator = self.new_generator(state)
        channels, dtype = self.transformer.config.in_channels // 4, state.cond["embeds"].dtype
        state.latents, ids = pipe.prepare_latents(
            1, channels, spec.height, spec.width, dtype, self.device, state.generator
        )
        state.context = {"ids": ids, "all_ids": ids, "images": None, "shapes": ()}
        if images := [self._fit(image) for image in input_images(state.request.tensors)]:
            packed, image_ids = pipe.prepare_image_latents(
                images, 1, state.generator, self.device, pipe.vae.dtype
            )
            state.context |= {"images": packed, "all_ids": torch.cat([ids, image_ids], 1)}
            state.context["shapes"] = tuple(tuple(image.shape[-2:]) for image in images)
        state.scheduler = self.new_scheduler()
        sigmas = None
        if not state.scheduler.config.get("use_flow_sigmas"):
            sigmas = flow.linear_sigmas(spec.num_inference_steps)
        mu = compute_empirical_mu(image_seq_len=state.latents.shape[1], num_steps=spec.num_inference_steps)
        flow.set_timesteps(state, self.device, sigmas, mu=mu)
        state.scheduler.set_begin_index(0)

    def _fit(self, image: Any) -> Tensor:
        processor, step = self.pipe.image_processor, self.multiple_of
        try:
            processor.check_image_input(image)
        except ValueError as error:
            raise InvalidRequest(f"{error}.", param="image") from None
        if image.width * image.height > MOST_PIXELS:
            image = processor._resize_to_target_area(image, MOST_PIXELS)
        height, width = image.height // step * step, image.width // step * step
        return processor.preprocess(image, height=height, width=width, resize_mode="crop")

    def group(self, state: DiffusionState) -> tuple[Hashable, ...]:
        """Texts of one length, and images of the same shapes: the network takes all rows' positions from the
        first."""
        return (state.cond["embeds"].shape[1], state.context["shapes"])

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Predicted velocities, `[1, patches, channels]` each."""
        states, encodings = [state for state, _ in rows], [encoding for _, encoding in rows]
        inputs = [
            state.latents
            if state.context["images"] is None
            else torch.cat([state.latents, state.context["images"]], 1)
            for state in states
        ]
        pictures = torch.cat(inputs)
        out = self.transformer(
            hidden_states=pictures.to(self.transformer.dtype),
            timestep=torch.stack([state.timestep for state in states]).to(states[0].latents.dtype) / 1000,
            guidance=None,
            encoder_hidden_states=torch.cat([encoding["embeds"] for encoding in encodings]),
            txt_ids=torch.cat([encoding["ids"] for encoding in encodings]),
            img_ids=torch.cat([state.context["all_ids"] for state in states]),
            joint_attention_kwargs=None,
            return_dict=False,
        )[0]
        return out[:, : states[0].latents.shape[1]].split(1)

    def _unpacked(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """Patches of latents as the VAE's normalization had them, `[rows, 4 × channels, rows, columns]`."""
        vae, step = self.pipe.vae, self.multiple_of
        ids = state.context["ids"].expand(len(latents), -1, -1)
        size = (state.spec.height // step, state.spec.width // step)
        packed = self.pipe._unpack_latents_with_ids(latents, ids, *size)
        mean, variance = (each.view(1, -1, 1, 1) for each in (vae.bn.running_mean, vae.bn.running_var))
        deviation = torch.sqrt(variance + vae.config.batch_norm_eps)
        return packed * deviation.to(packed) + mean.to(packed)

    def spatial(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """The latents unpacked."""
        return self.pipe._unpatchify_latents(self._unpacked(latents, state))

    def decode(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """Pictures, float `[rows, 3, height, width]`."""
        return self.vae_decode(self.spatial(latents, state))
