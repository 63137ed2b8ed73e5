"""Stable Audio Open: `StableAudioPipeline`, sound of a length asked for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from numpy.typing import NDArray

from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion import adapter
from omni_async.stages.diffusion.adapter import Row, Tensor
from omni_async.stages.diffusion.spec import Spec
from omni_async.stages.diffusion.state import DiffusionState, Encoding, Phase


class Adapter(adapter.Adapter):
    """Without a negative prompt a guided request is guided by zeros. Sounds of several lengths share steps:
    the network always makes the whole window, of which each is cut."""

    network = "StableAudioDiTModel"
    guidance = "uncond_first"
    default_scale = 7.0
    pads = True

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        self.sample_rate = pipe.vae.config.sampling_rate

    @property
    def longest(self) -> float:
        """Seconds that the model makes at most."""
        vae = self.pipe.vae
        return self.transformer.config.sample_size * vae.hop_length / vae.config.sampling_rate

    def check(self, spec: Spec) -> None:
        """Nothing before or after the model's window, of which the library would cut less than is asked."""
        super().check(spec)
        begin, longest = spec.audio_start_in_s, self.longest
        if not 0 <= spec.seconds <= longest:
            raise InvalidRequest(f"This model makes at most {longest:g} s.", param="seconds")
        if begin < 0 or begin >= longest or begin + spec.seconds > longest:
            message = f"audio_start_in_s and seconds must be within the {longest:g} s that this model makes."
            raise InvalidRequest(message, param="audio_start_in_s")

    def encode_texts(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """`embeds` `[1, tokens, width]` of each text."""
        embeds = self.pipe.encode_prompt(list(texts), self.device, False)
        return [Encoding(embeds=row[None]) for row in embeds]

    def prepare(self, state: DiffusionState) -> None:
        """Latents `[1, channels, length]` of the whole window, and the sound's begin and end as tokens."""
        spec, network = state.spec, self.transformer
        state.generator = self.new_generator(state)
        state.scheduler = self.new_scheduler()
        begin, end = self.pipe.encode_duration(spec.audio_start_in_s, self._end(spec), self.device, False, 1)
        state.cond = _with_times(state.cond["embeds"], begin, end)
        if state.uncond is not None:
            negative = state.uncond["embeds"]
            state.uncond = _with_times(negative, begin, end)
            if spec.negative_prompt is None:
                state.uncond["embeds"] = torch.zeros_like(state.uncond["embeds"])
        state.scheduler.set_timesteps(spec.num_inference_steps, device=self.device)
        state.timesteps, state.index = list(state.scheduler.timesteps), 0
        pipe = self.pipe_with(state.scheduler)
        length, dtype = int(network.config.sample_size), state.cond["embeds"].dtype
        state.latents = pipe.prepare_latents(
            1, network.config.in_channels, length, dtype, self.device, state.generator
        )
        state.context["step"] = pipe.prepare_extra_step_kwargs(state.generator, 0.0)

    def _end(self, spec: Spec) -> float:
        return spec.audio_start_in_s + spec.seconds if spec.seconds else self.longest

    def step_arguments(self, state: DiffusionState) -> dict[str, Any]:
        """The generator of the noise that the scheduler adds."""
        return state.context["step"]

    def group(self, state: DiffusionState) -> tuple[Hashable, ...]:
        """Sounds of any length until they are cut."""
        return self.group_of_media(state) if state.phase is Phase.DECODE else ()

    def group_of_media(self, state: DiffusionState) -> tuple[Hashable, ...]:
        """Sounds of one cut."""
        return (state.spec.seconds, state.spec.audio_start_in_s)

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """The network's outputs, `[1, channels, length]` each."""
        inputs = [state.scheduler.scale_model_input(state.latents, state.timestep) for state, _ in rows]
        times = torch.stack([state.timestep for state, _ in rows])
        # One time for all rows takes another kernel than a row of equal times, and gives other bits.
        times = times[:1] if bool((times == times[0]).all()) else times
        globals_ = torch.cat([encoding["times"] for _, encoding in rows])
        positions = get_1d_rotary_pos_embed(
            self.pipe.rotary_embed_dim,
            inputs[0].shape[2] + globals_.shape[1],
            use_real=True,
            repeat_interleave_real=False,
        )
        return self.transformer(
            torch.cat(inputs),
            times,
            encoder_hidden_states=torch.cat([encoding["embeds"] for _, encoding in rows]),
            global_hidden_states=globals_,
            rotary_embedding=positions,
            return_dict=False,
        )[0].split(1)

    def post_decode(self, latents: Tensor, state: DiffusionState) -> NDArray[Any]:
        """Float32 `[rows, samples, channels]`."""
        vae, spec = self.pipe.vae, state.spec
        sound = vae.decode(latents.to(vae.device, vae.dtype)).sample
        begin = int(spec.audio_start_in_s * vae.config.sampling_rate)
        end = int(self._end(spec) * vae.config.sampling_rate)
        return sound[:, :, begin:end].transpose(1, 2).float().cpu().contiguous().numpy()


def _with_times(embeds: Tensor, begin: Tensor, end: Tensor) -> Encoding:
    return Encoding(embeds=torch.cat([embeds, begin, end], 1), times=torch.cat([begin, end], 2))
