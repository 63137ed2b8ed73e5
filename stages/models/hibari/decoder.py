"""hibari's second half as a stream: frames → five spectral maps, with the convolutions' state per request.

Each of the nine convolutions needs three frames on either side. Instead of computing such context
again for every chunk, each layer keeps its last six input frames: a chunk costs what it is long,
and what comes out equals decoding the sentence whole. Output lags input by 27 frames until the
sentence ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from omni_async.stages.models.hibari.layers import ConvNext, Linear
from omni_async.stages.models.hibari.prosody import FRAME_CHANNELS
from omni_async.stages.models.hibari.ragged import linear

BINS = 601
REACH = 3
LAYERS = 8
LOOKAHEAD = REACH * (LAYERS + 1)


class DecoderState:
    """Per layer, the input frames that later outputs still need; zeros before the sentence begins."""

    def __init__(self, device: torch.device | None = None) -> None:
        widths = [FRAME_CHANNELS, *[Decoder.CHANNELS] * LAYERS]
        self.tails = [torch.zeros(REACH, width, device=device) for width in widths]


class Decoder(nn.Module):
    """The ConvNeXt decoder; `forward` advances a ragged batch of sentences by a chunk each."""

    CHANNELS = 256

    def __init__(self) -> None:
        super().__init__()
        self.dec_in = nn.Conv1d(FRAME_CHANNELS, self.CHANNELS, 2 * REACH + 1)
        self.dec = nn.ModuleList([ConvNext(self.CHANNELS, 768) for _ in range(LAYERS)])
        self.dec_norm = nn.LayerNorm(self.CHANNELS, 1e-5)
        self.head = Linear(self.CHANNELS, 5 * BINS)

    def forward(
        self, chunks: Sequence[Tensor], states: Sequence[DecoderState], last: Sequence[bool]
    ) -> list[Tensor]:
        """Chunks [n_i, 130] → maps [m_i, 5·601] for the frames that are now certain.

        m_i = n_i - 27 for a sentence's first chunk (which must have at least 28 frames unless it is
        the last too), n_i + 27 for its last, n_i otherwise.
        """
        rows = self._first(chunks, states, last)
        for number, block in enumerate(self.dec, 1):
            rows = self._block(block, number, rows, states, last)
        lengths = [len(row) for row in rows]
        return list(self.head(self.dec_norm(torch.cat(rows))).split(lengths))

    def _block(
        self,
        block: nn.Module,
        number: int,
        rows: list[Tensor],
        states: Sequence[DecoderState],
        last: Sequence[bool],
    ) -> list[Tensor]:
        assert isinstance(block, ConvNext)
        padded = [self._extend(number, *each) for each in zip(rows, states, last, strict=True)]
        convolved = [block.dw(row.t()[None])[0].t() for row in padded]
        residual = torch.cat([row[REACH:-REACH] for row in padded])
        mixed = block.mix(torch.cat(convolved), residual)
        return list(mixed.split([len(row) for row in convolved]))

    def _first(
        self, chunks: Sequence[Tensor], states: Sequence[DecoderState], last: Sequence[bool]
    ) -> list[Tensor]:
        # As a matrix product over unfolded windows: its bits do not depend on a chunk's length.
        padded = [self._extend(0, *each) for each in zip(chunks, states, last, strict=True)]
        windows = [row.unfold(0, 2 * REACH + 1, 1).flatten(1) for row in padded]
        out = linear(torch.cat(windows), self.dec_in.weight.flatten(1), self.dec_in.bias)
        return list(out.split([len(row) for row in windows]))

    def _extend(self, number: int, row: Tensor, state: DecoderState, last: bool) -> Tensor:
        """The layer's input with what it kept before it and, at the end, zeros behind it."""
        extended = torch.cat([state.tails[number], row])
        state.tails[number] = extended[-2 * REACH :].clone()
        return functional.pad(extended, (0, 0, 0, REACH)) if last else extended
