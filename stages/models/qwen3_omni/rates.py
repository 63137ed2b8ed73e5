"""How much sound a frame of codes is."""

from __future__ import annotations

from math import prod
from typing import Any

SAMPLE_RATE = 24000


def samples_per_frame(config: Any) -> int:
    """1920 in the published checkpoints: 12.5 frames a second."""
    decoder = config.code2wav_config
    return prod([*decoder.upsample_rates, *decoder.upsampling_ratios])
