"""The sampled talker's network: a small causal transformer that speaks an encoded sentence in steps of 25 ms.

Each step sees the encoder's vectors of the current phoneme and its neighbours, how long it has been on
that phoneme, and its own four codes of the step before (pitch twice, energy twice); it gives the chance
of moving on and the next four codes. Here it is as it is trained; `step_network.py` runs it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from omni_async.stages.models.hibari.spectra import Floats

TEXT = 192
CODES = 64
GROUPS = 4
START = CODES
LONGEST_PHONEME = 48
LOW_HZ, HIGH_HZ = 80.0, 360.0
UNVOICED_HZ = 40.0
ENERGY_RANGE = 10.0

Codes = NDArray[np.int64]


def decode_pitch(codes: Codes) -> Floats:
    """Codes → Hz; code 0 is unvoiced."""
    octaves = (codes - 1) / (CODES - 2)
    return np.where(codes > 0, LOW_HZ * (HIGH_HZ / LOW_HZ) ** octaves, 0.0).astype(np.float32)


def encode_pitch(hertz: Floats) -> Codes:
    """Hz → codes 0…63."""
    octaves = np.log(np.clip(hertz, LOW_HZ, HIGH_HZ) / LOW_HZ) / math.log(HIGH_HZ / LOW_HZ)
    return np.where(hertz > UNVOICED_HZ, 1 + np.round(octaves * (CODES - 2)), 0).astype(np.int64)


def decode_energy(codes: Codes) -> Floats:
    """Codes → energy."""
    return (codes / (CODES - 1) * 2 * ENERGY_RANGE - ENERGY_RANGE).astype(np.float32)


def encode_energy(energy: Floats) -> Codes:
    """Energy → codes 0…63."""
    scaled = (energy + ENERGY_RANGE) / (2 * ENERGY_RANGE) * (CODES - 1)
    return np.clip(np.round(scaled), 0, CODES - 1).astype(np.int64)


def with_neighbours(text: Floats) -> Floats:
    """Encoder vectors [L, 192] → each with those of the next and of the previous phoneme [L, 576]."""
    return np.concatenate([text, np.append(text[1:], text[-1:], 0), np.append(text[:1], text[:-1], 0)], 1)


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.hidden_norm = nn.LayerNorm(width)
        self.hidden_in = nn.Linear(width, 2 * width)
        self.hidden_out = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, steps, width] → the same; each step sees itself and those before."""
        q, k, v = self._heads(x).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._finish(x, mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return self.attention_in(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))

    def _finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.attention_out(mixed)
        return x + self.hidden_out(functional.gelu(self.hidden_in(self.hidden_norm(x))))


class Autoregressive(nn.Module):
    """The network, about 0.8 million parameters."""

    WIDTH, HEADS, LAYERS = 160, 4, 3

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(3 * TEXT, self.WIDTH)
        self.elapsed = nn.Embedding(LONGEST_PHONEME, self.WIDTH)
        self.previous = nn.ModuleList([nn.Embedding(CODES + 1, self.WIDTH) for _ in range(GROUPS)])
        self.blocks = nn.ModuleList([Block(self.WIDTH, self.HEADS) for _ in range(self.LAYERS)])
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, GROUPS * CODES + 1)

    def forward(self, text: Tensor, elapsed: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """text [B, T, 576], elapsed [B, T], previous [B, T, 4] → logits of moving on [B, T] and
        of the codes [B, T, 4, 64]."""
        x = self.text(text) + self.elapsed(elapsed)
        for number, embedding in enumerate(self.previous):
            x = x + embedding(previous[..., number])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits[..., 0], logits[..., 1:].unflatten(-1, (GROUPS, CODES))
