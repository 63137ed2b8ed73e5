"""What a listener hears of the built-in voice, by a speech recogniser."""

from __future__ import annotations

from typing import Any

import pytest

from omni_async.stages.models.hibari.voices import VOICES
from tests.hibari_stages import Utterance, speak
from tests.recogniser import HARVARD, word_error_rate

TEN = " ".join(HARVARD)
GATE = 0.15


def heard(text: str, voice: str = "heart", **params: Any) -> float:
    """Word error rate of `text` as it is spoken."""
    (pcm,) = speak(Utterance(text, voice, params=params))
    return word_error_rate(text, pcm, 24000)


@pytest.mark.parametrize("voice", VOICES)
def test_every_voice_is_understood(voice: str) -> None:
    assert heard(TEN, voice) <= GATE


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_sampled_talker_is_understood(temperature: float) -> None:
    assert heard(TEN, temperature=temperature) <= GATE


@pytest.mark.parametrize("speed", [0.5, 1.3])
def test_slow_and_fast_speech_is_understood(speed: float) -> None:
    assert heard(TEN, speed=speed) <= GATE


def test_text_without_punctuation_is_understood_to_its_end() -> None:
    text = TEN.replace(".", "").lower() + " " + " ".join(HARVARD[:4]).replace(".", "").lower()
    assert heard(text) <= 0.2


def test_another_text_would_not_pass() -> None:
    (pcm,) = speak(Utterance(" ".join(HARVARD[:5])))
    assert word_error_rate(" ".join(HARVARD[5:]), pcm, 24000) > 0.7
