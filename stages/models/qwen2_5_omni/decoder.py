"""Codes → mel → PCM: transformers' modules, run over windows and for several requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

from omni_async.stages.models.qwen2_5_omni.parts import Voice

STEPS = 10
GUIDANCE = 0.5
"""Points of the path from noise to mel, and guidance, as in the reference implementation."""

ANTI_ALIASING = 6
"""Samples that each activation of the vocoder looks to either side."""


class Denoiser:
    """The diffusion transformer. Its blocks of frames see one block before and one behind them."""

    def __init__(self, dit: Any, voices: dict[str, Voice]) -> None:
        self._dit = dit
        weight = dit.proj_out.weight
        self._like = {"device": weight.device, "dtype": weight.dtype}
        encode = dit.input_embed.spk_encoder
        with torch.inference_mode():
            self._voices: dict[str, tuple[Tensor, Tensor]] = {}
            for name, voice in voices.items():
                mel, speaker = voice.mel.to(**self._like), voice.speaker.to(**self._like).reshape(1, -1)
                without = [encode(torch.zeros_like(mel)), torch.zeros_like(speaker)]
                self._voices[name] = torch.cat([encode(mel), speaker], -1), torch.cat(without, -1)
        times = torch.linspace(0, 1, STEPS, **self._like)
        # Sway sampling with the coefficient -1: more of the points lie near the noise.
        self._times = times - (torch.cos(torch.pi / 2 * times) - 1 + times)

    def mel(self, noise: Tensor, codes: Tensor, voices: Sequence[str]) -> Tensor:
        """`noise` `[rows, frames, mels]` and `codes` int64 `[rows, frames / repeats]` to mel like `noise`."""
        noise, codes = noise.to(**self._like), codes.to(self._like["device"])
        rows, frames = noise.shape[:2]
        about = torch.cat([self._voices[name][dropped] for dropped in (0, 1) for name in voices])
        about = about[:, None].expand(-1, frames, -1)
        embed = self._dit.text_embed
        said = torch.cat([embed(codes), embed(codes, drop_code=True)])
        width = self._dit.config.enc_dim
        fixed = torch.cat([about[..., :width], said, about[..., width:]], dim=-1)
        blocks = torch.arange(frames, device=noise.device) // self._dit.block_size
        apart = (blocks[None, :] - blocks[:, None])[None, None]
        places = torch.arange(frames, device=noise.device)[None].expand(2 * rows, -1)
        angles = self._dit.rotary_embed(noise, places)

        def velocity(time: Tensor, state: Tensor) -> Tensor:
            moment = self._dit.time_embed(time.repeat(2 * rows))
            hidden = self._dit.input_embed.proj(torch.cat([torch.cat([state, state]), fixed], dim=-1))
            for block in self._dit.transformer_blocks:
                hidden = block(hidden, moment, position_embeddings=angles, block_diff=apart)
            guided, free = self._dit.proj_out(self._dit.norm_out(hidden, moment)).chunk(2)
            return guided + (guided - free) * GUIDANCE

        return RungeKutta4ODESolver(velocity, noise).integrate(self._times)[-1]


def vocode(vocoder: Any, mel: Tensor) -> Tensor:
    """Mel `[rows, frames, mels]` to samples float32 `[rows, samples]`."""
    return vocoder(mel.transpose(1, 2)).reshape(len(mel), -1)


def vocoder_reach(config: Any) -> int:
    """How many frames of mel to either side a sample depends on."""
    kernels = zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes, strict=True)
    block = max(
        sum((kernel - 1) // 2 * (dilation + 1) + 2 * ANTI_ALIASING for dilation in dilations)
        for kernel, dilations in kernels
    )
    rate, frames = 1.0, 3.0
    for factor, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
        frames += ceil(kernel / factor) / rate
        rate *= factor
        frames += block / rate
    return ceil(frames + (ANTI_ALIASING + 3) / rate)
