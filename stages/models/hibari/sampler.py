"""Sampling from the autoregressive talker: sentences on their way, advanced together step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from omni_async.errors import ConfigError
from omni_async.stages.models.hibari.autoregressive import (
    CODES,
    GROUPS,
    LONGEST_PHONEME,
    START,
    Codes,
    decode_energy,
    decode_pitch,
    with_neighbours,
)
from omni_async.stages.models.hibari.frames import Frames, assemble
from omni_async.stages.models.hibari.prosody import UNIT_FRAMES, Encoded
from omni_async.stages.models.hibari.spectra import Floats
from omni_async.stages.models.hibari.step_network import LAYERS, Cache, StepNetwork

WEIGHTS = Path(__file__).parent / "weights" / "talker.safetensors"
ADVANCE_TEMPERATURE = 0.5
"""Timing is sampled at half of the request's temperature: it errs sooner than pitch."""

COLDEST = 0.01
"""Below this temperature the likeliest is all there is."""

LONGEST_FACTOR, LONGEST_EXTRA = 2.0, 40
"""A sentence may take twice as many steps as predicted, and a second more; it is then at its end."""


class SampledSentence:
    """One sentence on its way: where it is, what it has said, and its own random numbers."""

    def __init__(self, encoded: Encoded, *, temperature: float) -> None:
        self.content = encoded.content
        self.text = with_neighbours(encoded.text)
        self._heat = np.float32(max(temperature, COLDEST))
        self.longest = int(LONGEST_FACTOR * float(encoded.units.sum())) + LONGEST_EXTRA
        self.caches = [Cache() for _ in range(LAYERS)]
        self.phoneme = 0
        self.elapsed = 0
        self.previous: Codes = np.full(GROUPS, START, np.int64)
        self.steps = 0
        self._index: list[int] = []
        self._codes: list[Codes] = []

    @property
    def done(self) -> bool:
        """Its last phoneme has been spoken."""
        return self.phoneme >= len(self.text) or self.steps >= self.longest

    @property
    def taken(self) -> int:
        """Steps that have become frames."""
        return self.steps - len(self._index)

    def take(self, logits: Floats, rng: np.random.Generator) -> None:
        """Sample a step from its logits [1 + 4·64]."""
        # The largest of logit plus Gumbel noise is a sample of the softmax.
        chances = np.maximum(rng.random(1 + GROUPS * CODES, np.float32), np.float32(1e-12))
        scores = logits[1:] / self._heat - np.log(-np.log(chances[1:]))
        self.previous = scores.reshape(GROUPS, CODES).argmax(1)
        self._codes.append(self.previous)
        self._index.append(self.phoneme)
        self.steps += 1
        moves_on = logits[0] / (ADVANCE_TEMPERATURE * self._heat) > np.log(chances[0] / (1 - chances[0]))
        if moves_on or self.elapsed + 1 >= LONGEST_PHONEME:
            self.phoneme, self.elapsed = self.phoneme + 1, 0
        else:
            self.elapsed += 1

    def take_frames(self) -> Frames:
        """The frames, 12.5 ms each, of the steps since the last time."""
        codes = np.array(self._codes, np.int64).reshape(-1, GROUPS)
        index = np.repeat(np.array(self._index, np.intp), UNIT_FRAMES)
        self._codes, self._index = [], []
        pitch, energy = decode_pitch(codes[:, :UNIT_FRAMES]), decode_energy(codes[:, UNIT_FRAMES:])
        return assemble(self.content, index, pitch.reshape(-1), energy.reshape(-1))


class Sampler:
    """The network, and how a ragged batch of sentences takes a step of it."""

    def __init__(self, weights: Path = WEIGHTS) -> None:
        try:
            self._net = StepNetwork(load_file(weights))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{weights} cannot be loaded: {error}") from error

    def step(self, rows: Sequence[SampledSentence], generators: Sequence[np.random.Generator]) -> None:
        """Advance every row by 25 ms. Raises `FloatingPointError`, and moves none, when logits are not
        finite."""
        logits = self._net.step(
            np.stack([row.text[row.phoneme] for row in rows]),
            np.array([row.elapsed for row in rows]),
            np.stack([row.previous for row in rows]),
            [row.caches for row in rows],
            [row.steps for row in rows],
        )
        if not np.isfinite(logits).all():
            raise FloatingPointError("the talker's logits are not finite")
        for row, generator, one in zip(rows, generators, logits, strict=True):
            row.take(one, generator)
