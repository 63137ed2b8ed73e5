"""hibari's first half: phonemes → durations, pitch and energy, deterministic as the package's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from omni_async.stages.models.hibari.layers import ConvNext, TextEncoder
from omni_async.stages.models.hibari.ragged import per_row

CONTENT = 128
FRAME_CHANNELS = CONTENT + 2
"""A frame of 12.5 ms: content, log pitch, energy."""


class Prosody(nn.Module):
    """The text encoders and the predictors of duration, pitch and energy."""

    def __init__(self) -> None:
        super().__init__()
        self.text = TextEncoder(192, 384, 6)
        self.ctext = TextEncoder(CONTENT, 256, 4)
        self.dur0 = nn.Conv1d(192, 192, 3, padding=1)
        self.dur2 = nn.Conv1d(192, 1, 1)
        self.pro_in = nn.Conv1d(192, 192, 1)
        self.pro = nn.ModuleList([ConvNext(192, 384, 7, d) for d in (1, 2, 4, 8, 1, 2)])
        self.pro_out = nn.Conv1d(192, 4, 1)

    def durations(self, text: Tensor, speed: float) -> Tensor:
        """[L, 192] → int64 [L], in units of 25 ms, one at least."""
        hidden = functional.gelu(self.dur0(text.t()[None]))
        units = torch.exp(self.dur2(hidden)[0, 0]) - 1
        return torch.clamp(torch.round(units / speed), min=1).long()

    def contours(self, spread: Tensor, lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Encoder vectors spread over time [Σn, 192], 25 ms each → per row pitch [2n] in Hz and energy
        [2n], 12.5 ms each."""
        x = per_row(spread, lengths, lambda row: self.pro_in(row.t()[None])[0].t())
        for block in self.pro:
            x = block(x, lengths)
        return [self._split(self.pro_out(row.t()[None])[0]) for row in x.split(list(lengths))]

    def _split(self, out: Tensor) -> tuple[Tensor, Tensor]:
        # [4, n] is pitch and energy, two values for each 25 ms.
        pairs = out.view(2, 2, -1).transpose(1, 2).reshape(2, -1)
        return pairs[0] * 100.0, pairs[1] * 5.0


def make_frames(content: Tensor, index: Tensor, pitch: Tensor, energy: Tensor) -> Tensor:
    """Content [L, 128] by phoneme, the phoneme of each 12.5 ms [F], pitch [F] in Hz, energy [F] →
    frames float32 [F, 130]."""
    log_pitch = torch.log(1 + functional.relu(pitch)) / 5
    return torch.cat([content[index], log_pitch[:, None], (energy / 5)[:, None]], 1)
