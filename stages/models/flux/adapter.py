"""FLUX.1: `FluxPipeline`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion import adapter, flow
from omni_async.stages.diffusion.adapter import Row, Tensor
from omni_async.stages.diffusion.forwarding import replace_forward
from omni_async.stages.diffusion.padding import pad_stack
from omni_async.stages.diffusion.spec import Spec
from omni_async.stages.diffusion.state import DiffusionState, Encoding
from omni_async.stages.models.flux.attention import RowAttention, RowPositions

EMBEDDED_SCALE = 3.5
"""The pipelines' own `guidance_scale` for checkpoints that take one."""


class Adapter(adapter.Adapter):
    """`guidance_scale` is an input of the network; a negative prompt takes a forward pass of its own and
    is weighed by `true_cfg_scale`. Pictures of several sizes are padded."""

    network = "FluxTransformer2DModel"
    dispatches_attention = True
    scale_name = "true_cfg_scale"
    default_length = 512
    pads = True

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        self.multiple_of = pipe.vae_scale_factor * 2
        network = pipe.transformer
        network.set_attn_processor({name: RowAttention() for name in network.attn_processors})
        self._positions = RowPositions()
        self._positions.embed = replace_forward(pipe.transformer.pos_embed, self._positions)

    def check(self, spec: Spec) -> None:
        """Only a distilled model takes a guidance scale."""
        super().check(spec)
        if spec.guidance_scale is not None and not self.transformer.config.guidance_embeds:
            message = "guidance_scale has no effect on this model; true_cfg_scale has."
            raise InvalidRequest(message, param="guidance_scale")

    def encode_texts(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """`embeds` `[1, tokens, width]`, `pooled` `[1, width]` and the positions `ids` `[tokens, 3]`."""
        embeds, pooled, ids = self.pipe.encode_prompt(
            prompt=list(texts),
            prompt_2=None,
            device=self.device,
            max_sequence_length=self.length_of(state.spec),
        )
        rows = zip(embeds, pooled, strict=True)
        return [Encoding(embeds=e[None], pooled=p[None], ids=ids) for e, p in rows]

    def prepare(self, state: DiffusionState) -> None:
        """Packed latents `[1, patches, channels]` and their positions."""
        state.generator = self.new_generator(state)
        self.begin(state)
        state.scheduler = self.new_scheduler()
        sigmas = None
        if not state.scheduler.config.get("use_flow_sigmas"):
            sigmas = flow.linear_sigmas(state.spec.num_inference_steps)
        mu = flow.shift_of(state.scheduler.config, state.latents.shape[1])
        flow.set_timesteps(state, self.device, sigmas, mu=mu)
        state.scheduler.set_begin_index(0)

    def begin(self, state: DiffusionState) -> None:
        """The latents and their positions."""
        channels, dtype = self.transformer.config.in_channels // 4, state.cond["embeds"].dtype
        size = (state.spec.height, state.spec.width)
        state.latents, state.context["ids"] = self.pipe.prepare_latents(
            1, channels, *size, dtype, self.device, state.generator
        )

    def inputs(self, state: DiffusionState) -> Tensor:
        """What the transformer sees of a request, `[tokens, channels]`."""
        return state.latents[0]

    def group(self, state: DiffusionState) -> tuple[Hashable, ...]:
        """Texts of one length."""
        return (state.cond["embeds"].shape[1],)

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Predicted velocities, `[1, patches, channels]` each."""
        states, encodings = [state for state, _ in rows], [encoding for _, encoding in rows]
        pictures, mask = pad_stack([self.inputs(state) for state in states])
        arguments: dict[str, Any] = {}
        if mask is not None:
            words = mask.new_ones(len(rows), encodings[0]["embeds"].shape[1])
            arguments["attention_mask"] = torch.cat([words, mask], 1)[:, None, None, :]
        longest = max(states, key=lambda state: len(state.context["ids"]))
        with self._positions.of([(e["ids"], s.context["ids"]) for s, e in rows]):
            out = self.transformer(
                hidden_states=pictures,
                timestep=torch.stack([state.timestep for state in states]).to(pictures.dtype) / 1000,
                guidance=self._guidance(states),
                pooled_projections=torch.cat([encoding["pooled"] for encoding in encodings]),
                encoder_hidden_states=torch.cat([encoding["embeds"] for encoding in encodings]),
                txt_ids=encodings[0]["ids"],
                img_ids=longest.context["ids"],
                joint_attention_kwargs=arguments,
                return_dict=False,
            )[0]
        return [row[None, : state.latents.shape[1]] for row, state in zip(out, states, strict=True)]

    def _guidance(self, states: Sequence[DiffusionState]) -> Tensor | None:
        if not self.transformer.config.guidance_embeds:
            return None
        given = [state.spec.guidance_scale for state in states]
        scales = [EMBEDDED_SCALE if scale is None else scale for scale in given]
        return torch.tensor(scales, device=self.device, dtype=torch.float32)

    def spatial(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """The latents unpacked."""
        spec = state.spec
        return self.pipe._unpack_latents(latents, spec.height, spec.width, self.pipe.vae_scale_factor)

    def decode(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """Pictures, float `[rows, 3, height, width]`."""
        return self.vae_decode(self.unscaled(self.spatial(latents, state)))
