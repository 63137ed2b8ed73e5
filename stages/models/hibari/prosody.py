"""hibari's first half: phonemes → frames, by the package's own graph, so that timing and pitch are its own
bit for bit; and the text encoders alone, for the sampled talker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_async.stages.models.hibari.frames import Frames
from omni_async.stages.models.hibari.onnx_reader import Graph
from omni_async.stages.models.hibari.onnx_writer import cut
from omni_async.stages.models.hibari.package_model import open_session
from omni_async.stages.models.hibari.spectra import Floats

FRAMES, PITCH = "/Concat_43_output_0", "f0"
TEXT, CONTENT, UNITS = "/Transpose_55_output_0", "/Transpose_22_output_0", "/Clip_output_0"
"""What the exporter called the outputs of both encoders, and the durations before they are integers."""

UNIT_FRAMES = 2
"""Durations are counted in units of 25 ms: two frames."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Phonemes [L] as vectors: for prosody [L, 192], for content [L, 128]; and the predicted durations
    [L] in units of 25 ms."""

    text: Floats
    content: Floats
    units: Floats


class Prosody:
    """Both parts of the package's graph. Rows are run one by one, so that none feels another."""

    def __init__(self, graph: Graph, device: str) -> None:
        self._speak = open_session(cut(graph, [FRAMES, PITCH]), device)
        self._encode = open_session(cut(graph, [TEXT, CONTENT, UNITS]), device)

    def speak(self, ids: Sequence[int], speed: float) -> Frames:
        """The sentence as the package speaks it; `speed` divides durations, one unit at least each."""
        values, pitch = self._speak.run(None, _inputs(ids, speed))
        return Frames(np.ascontiguousarray(values[0].T), pitch[0])

    def encode(self, ids: Sequence[int]) -> Encoded:
        """The vectors from which a talker samples."""
        text, content, units = self._encode.run(None, _inputs(ids, 1.0))
        return Encoded(np.ascontiguousarray(text[0].T), np.ascontiguousarray(content[0].T), units.reshape(-1))


def _inputs(ids: Sequence[int], speed: float) -> dict[str, NDArray[Any]]:
    return {"ids": np.array([ids], np.int64), "speed": np.array([speed], np.float32)}
