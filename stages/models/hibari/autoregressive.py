"""The sampled talker: a small causal transformer that speaks an encoded sentence in steps of 25 ms.

Each step sees the encoder's vectors of the current phoneme and its neighbours, how long it has been on
that phoneme, and its own four codes of the step before (pitch twice, energy twice); it gives the chance
of moving on and the next four codes. Rows are ragged: each attends to its own past alone, so a row's
bits do not depend on who shares its step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from omni_async.stages.models.hibari.layers import Linear

CODES = 64
GROUPS = 4
START = CODES
LONGEST_PHONEME = 40
LOW_HZ, HIGH_HZ = 80.0, 360.0
ENERGY_RANGE = 10.0
ADVANCE_TEMPERATURE = 0.5


def decode_pitch(codes: Tensor) -> Tensor:
    """int64 codes → Hz; code 0 is unvoiced."""
    hertz = torch.exp((codes - 1).float() / (CODES - 2) * math.log(HIGH_HZ / LOW_HZ) + math.log(LOW_HZ))
    return torch.where(codes > 0, hertz, 0.0)


def encode_pitch(hertz: Tensor) -> Tensor:
    """Hz → int64 codes 0…63."""
    octaves = torch.log(hertz.clamp(LOW_HZ, HIGH_HZ) / LOW_HZ) / math.log(HIGH_HZ / LOW_HZ)
    return torch.where(hertz > 40.0, 1 + torch.round(octaves * (CODES - 2)), 0.0).long()


def decode_energy(codes: Tensor) -> Tensor:
    """int64 codes → energy."""
    return codes.float() / (CODES - 1) * 2 * ENERGY_RANGE - ENERGY_RANGE


def encode_energy(energy: Tensor) -> Tensor:
    """Energy → int64 codes 0…63."""
    scaled = (energy + ENERGY_RANGE) / (2 * ENERGY_RANGE) * (CODES - 1)
    return torch.round(scaled).clamp(0, CODES - 1).long()


class Cache:
    """Keys and values of one row in one layer, [heads, steps, width], grown by doubling."""

    def __init__(self, heads: int, width: int) -> None:
        self.keys = torch.zeros(heads, 64, width)
        self.values = torch.zeros(heads, 64, width)

    def put(self, at: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store step `at` and return all keys and values up to it."""
        if at == self.keys.shape[1]:
            self.keys = torch.cat([self.keys, torch.zeros_like(self.keys)], 1)
            self.values = torch.cat([self.values, torch.zeros_like(self.values)], 1)
        self.keys[:, at], self.values[:, at] = key, value
        return self.keys[:, : at + 1], self.values[:, : at + 1]


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1 = nn.LayerNorm(width)
        self.n2 = nn.LayerNorm(width)
        self.qkv = Linear(width, 3 * width)
        self.o = Linear(width, width)
        self.a = Linear(width, 2 * width)
        self.b = Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Training: [batch, steps, width], causal."""
        batch, steps, width = x.shape
        q, k, v = self._heads(x).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._finish(x, mixed.transpose(1, 2).reshape(batch, steps, width))

    def step(self, x: Tensor, caches: Sequence[Cache], at: Sequence[int]) -> Tensor:
        """One step of a ragged batch: [rows, width]; row i is at step `at[i]` of its own past."""
        mixed: list[Tensor] = []
        for (q, k, v), cache, position in zip(self._heads(x), caches, at, strict=True):
            keys, values = cache.put(position, k, v)
            mixed.append(functional.scaled_dot_product_attention(q[:, None], keys, values).reshape(-1))
        return self._finish(x, torch.stack(mixed))

    def _heads(self, x: Tensor) -> Tensor:
        return self.qkv(self.n1(x)).unflatten(-1, (3, self.heads, -1))

    def _finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.o(mixed)
        return x + self.b(functional.gelu(self.a(self.n2(x))))


class Autoregressive(nn.Module):
    """The network. Inputs per step: encoder vectors of the phoneme, the next and the one before
    [576], steps spent on it, and the codes of the step before [4]."""

    WIDTH, HEADS, LAYERS = 160, 4, 3
    TEXT = 192

    def __init__(self) -> None:
        super().__init__()
        self.hin = Linear(3 * self.TEXT, self.WIDTH)
        self.el = nn.Embedding(48, self.WIDTH)
        self.ce = nn.ModuleList([nn.Embedding(CODES + 1, self.WIDTH) for _ in range(GROUPS)])
        self.blk = nn.ModuleList([Block(self.WIDTH, self.HEADS) for _ in range(self.LAYERS)])
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = Linear(self.WIDTH, GROUPS * CODES + 1)

    def forward(self, text: Tensor, elapsed: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Training: text [B, T, 576], elapsed [B, T], previous [B, T, 4] → logits of moving on [B, T] and
        of the codes [B, T, 4, 64]."""
        x = self._embed(text, elapsed, previous)
        for block in self.blk:
            x = block(x)
        return self._logits(x)

    def step(self, rows: Sequence[SpokenSentence]) -> None:
        """Advance every row by 25 ms."""
        text = torch.stack([row.text_window() for row in rows])
        elapsed = torch.tensor([min(row.elapsed, 47) for row in rows])
        x = self._embed(text, elapsed, torch.stack([row.previous for row in rows]))
        at = [len(row.index) for row in rows]
        for number, block in enumerate(self.blk):
            assert isinstance(block, Block)
            x = block.step(x, [row.caches[number] for row in rows], at)
        advance, codes = self._logits(x)
        if not torch.isfinite(codes).all():
            # Before any row has moved: the rows are then tried one by one, and the bad one fails alone.
            raise FloatingPointError("the talker's logits are not finite")
        for row, logit, code_logits in zip(rows, advance, codes, strict=True):
            row.take(logit, code_logits)

    def _embed(self, text: Tensor, elapsed: Tensor, previous: Tensor) -> Tensor:
        x = self.hin(text) + self.el(elapsed)
        for number, embedding in enumerate(self.ce):
            x = x + embedding(previous[..., number])
        return x

    def _logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(self.norm(x))
        return out[..., 0], out[..., 1:].unflatten(-1, (GROUPS, CODES))


class SpokenSentence:
    """One sentence on its way: where it is, what it has said, and its own random numbers.

    `longest` bounds it in steps, so that a sentence that does not come to its end is ended.
    """

    def __init__(self, text: Tensor, *, generator: torch.Generator, temperature: float, longest: int) -> None:
        self.text = text
        self.generator = generator
        self.temperature = temperature
        self.longest = longest
        self.phoneme = 0
        self.elapsed = 0
        self.previous = torch.full((GROUPS,), START)
        self.index: list[int] = []
        self.codes: list[Tensor] = []
        heads, width = Autoregressive.HEADS, Autoregressive.WIDTH // Autoregressive.HEADS
        self.caches = [Cache(heads, width) for _ in range(Autoregressive.LAYERS)]

    @property
    def done(self) -> bool:
        """Its last phoneme has been spoken."""
        return self.phoneme >= len(self.text) or len(self.index) >= self.longest

    def text_window(self) -> Tensor:
        """The encoder's vectors of the phoneme, the next and the one before, [576]."""
        at, last = self.phoneme, len(self.text) - 1
        return torch.cat([self.text[at], self.text[min(at + 1, last)], self.text[max(at - 1, 0)]])

    def take(self, advance: Tensor, codes: Tensor) -> None:
        """Sample the step's codes [4, 64] and whether to move on."""
        chances = torch.softmax(codes / self.temperature, -1)
        self.previous = torch.multinomial(chances, 1, generator=self.generator)[:, 0]
        self.codes.append(self.previous)
        self.index.append(self.phoneme)
        chance = torch.sigmoid(advance / ADVANCE_TEMPERATURE)
        moves_on = bool(torch.rand((), generator=self.generator) < chance)
        if moves_on or self.elapsed + 1 >= LONGEST_PHONEME:
            self.phoneme, self.elapsed = self.phoneme + 1, 0
        else:
            self.elapsed += 1
