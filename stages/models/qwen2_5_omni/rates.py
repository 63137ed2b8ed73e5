"""How much sound a code is."""

from __future__ import annotations

from math import prod
from typing import Any

SAMPLE_RATE = 24000


def samples_per_mel(config: Any) -> int:
    """240 in the published checkpoints."""
    return prod(config.token2wav_config.bigvgan_config.upsample_rates)


def codes_per_second(config: Any) -> float:
    """50 in the published checkpoints."""
    return SAMPLE_RATE / samples_per_mel(config) / config.token2wav_config.dit_config.repeats
