"""The blocks that hibari's networks are made of, over ragged batches [frames, channels]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from omni_async.stages.models.hibari.ragged import linear, per_row


class Linear(nn.Linear):
    """A linear layer whose bits do not depend on the number of rows."""

    def forward(self, input: Tensor) -> Tensor:
        """[n, in] → [n, out]."""
        return linear(input, self.weight, self.bias)


class ConvNext(nn.Module):
    """A one-dimensional ConvNeXt block: depthwise convolution, LayerNorm, two linears, scaled residual."""

    def __init__(self, channels: int, hidden: int, kernel: int = 7, dilation: int = 1) -> None:
        super().__init__()
        self.dw = nn.Conv1d(channels, channels, kernel, dilation=dilation, groups=channels)
        self.norm = nn.LayerNorm(channels, 1e-5)
        self.pw1 = Linear(channels, hidden)
        self.pw2 = Linear(hidden, channels)
        self.gamma = nn.Parameter(torch.ones(channels))
        self.reach = dilation * (kernel // 2)

    def mix(self, convolved: Tensor, residual: Tensor) -> Tensor:
        """What follows the convolution: both [n, channels]."""
        hidden = functional.gelu(self.pw1(self.norm(convolved)))
        return torch.addcmul(residual, self.gamma, self.pw2(hidden))

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[Σn, channels] → the same; each row is padded with zeros at its own ends."""
        return self.mix(per_row(x, lengths, self._convolve), x)

    def _convolve(self, row: Tensor) -> Tensor:
        padded = functional.pad(row.t()[None], (self.reach, self.reach))
        return self.dw(padded)[0].t()


class Attention(nn.Module):
    """One pre-norm transformer layer, applied `repeats` times with the same weights."""

    HEADS = 2

    def __init__(self, channels: int, hidden: int, repeats: int) -> None:
        super().__init__()
        self.repeats = repeats
        self.norm1 = nn.LayerNorm(channels, 1e-5)
        self.norm2 = nn.LayerNorm(channels, 1e-5)
        self.qkv = Linear(channels, 3 * channels)
        self.out = Linear(channels, channels)
        self.l1 = Linear(channels, hidden)
        self.l2 = Linear(hidden, channels)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[Σn, channels] → the same; each row attends to itself."""
        for _ in range(self.repeats):
            mixed = per_row(self.qkv(self.norm1(x)), lengths, self._attend)
            x = x + self.out(mixed)
            x = x + self.l2(functional.gelu(self.l1(self.norm2(x))))
        return x

    def _attend(self, qkv: Tensor) -> Tensor:
        n, width = qkv.shape[0], qkv.shape[1] // 3
        q, k, v = qkv.view(n, 3, self.HEADS, width // self.HEADS).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None])
        return mixed[0].transpose(0, 1).reshape(n, width)


class TextEncoder(nn.Module):
    """Phoneme ids → one vector each: embedding, two convolutions, repeated attention."""

    VOCABULARY = 178

    def __init__(self, channels: int, hidden: int, repeats: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(self.VOCABULARY, channels)
        self.convs = nn.ModuleList([ConvNext(channels, hidden, 5) for _ in range(2)])
        self.attn = Attention(channels, hidden, repeats)
        self.norm = nn.LayerNorm(channels, 1e-5)

    def forward(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """int64 [Σn] → float32 [Σn, channels]."""
        x = self.emb(ids)
        for conv in self.convs:
            x = conv(x, lengths)
        return self.norm(self.attn(x, lengths))
