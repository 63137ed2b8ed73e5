"""The built-in voice's two stages, driven directly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_async.errors import InvalidRequest
from omni_async.stages.executor import Chunk, StageRequest, outputs_of
from tests.hibari_stages import Utterance, code2wav_stage, speak, talk, talker_stage

TEXT = "Rice is often served in round bowls. The juice of lemons makes fine punch."
SAMPLED = {"temperature": 0.7}


def partners(count: int) -> list[Utterance]:
    """Other requests, each unlike the others: both talkers, several voices, lengths and speeds."""
    voices = ["rook", "heart", "owl", "wren", "crane", "robin", "heart"]
    params: list[dict[str, Any]] = [{}, SAMPLED, {"speed": 1.7}, {"temperature": 1.5, "speed": 0.6}]
    return [
        Utterance(f"Number {i} is different. " * (i % 3 + 1), voices[i % 7], 50 + i, params[i % 4])
        for i in range(count)
    ]


@pytest.mark.parametrize("params", [{}, SAMPLED, {"speed": 3.0}, {**SAMPLED, "speed": 0.8}])
def test_a_request_has_the_same_bits_alone_and_in_any_company(params: dict[str, Any]) -> None:
    (alone,) = speak(Utterance(TEXT, "crane", 9, params))
    for size in (2, 5, 8):
        together = partners(size - 1)
        together.insert(size // 2, Utterance(TEXT, "crane", 9, params))
        assert np.array_equal(speak(*together)[size // 2], alone), f"in a batch of {size}"


@pytest.mark.parametrize("params", [{}, SAMPLED])
def test_the_seed_decides(params: dict[str, Any]) -> None:
    one, again, other = speak(*(Utterance(TEXT, seed=seed, params=params) for seed in (4, 4, 5)))
    assert np.array_equal(one, again)
    assert not np.array_equal(one[:20000], other[:20000])


def test_sampling_varies_pitch_and_timing_and_the_plain_talker_does_not() -> None:
    def pitch(seed: int, **params: Any) -> list[float]:
        outputs = talk(Utterance(TEXT, seed=seed, params=params))
        return np.concatenate([output.tensors["pitch"] for output in outputs]).tolist()

    assert pitch(1) == pitch(2)
    assert pitch(1, temperature=0.7) == pitch(1, temperature=0.7)
    assert pitch(1, temperature=0.7) != pitch(2, temperature=0.7)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("speed", [0.25, 0.5, 2.0, 4.0])
def test_speed_scales_duration(speed: float, temperature: float) -> None:
    plain, changed = speak(
        Utterance(TEXT, params={"temperature": temperature}),
        Utterance(TEXT, params={"temperature": temperature, "speed": speed}),
    )
    assert len(plain) / len(changed) == pytest.approx(speed, rel=0.15)


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_speed_keeps_pitch(temperature: float) -> None:
    def mean_pitch(speed: float) -> float:
        params = {"temperature": temperature, "speed": speed}
        outputs = talk(Utterance(TEXT, params=params))
        pitch = np.concatenate([output.tensors["pitch"] for output in outputs])
        return float(np.mean(pitch[pitch > 40]))

    # The package's own melody is a little lower when it is slow; played at that speed it would be a third.
    assert mean_pitch(2.5) == pytest.approx(mean_pitch(1.0), rel=0.1)
    assert mean_pitch(0.3) == pytest.approx(mean_pitch(1.0), rel=0.1)


def test_voices_speak_at_pitches_of_their_own() -> None:
    def mean_pitch(voice: str) -> float:
        pitch = np.concatenate([o.tensors["pitch"] for o in talk(Utterance(TEXT, voice))])
        return float(np.mean(pitch[pitch > 40]))

    heart = mean_pitch("heart")
    assert mean_pitch("wren") / heart == pytest.approx(1.22, rel=0.05)
    assert mean_pitch("rook") / heart == pytest.approx(0.78, rel=0.05)


def test_a_sampled_sentence_ends_even_when_it_would_go_on() -> None:
    outputs = talk(Utterance("Hello.", params={"temperature": 2.0, "speed": 1.0}))
    frames = sum(len(output.tensors["pitch"]) for output in outputs)
    assert frames < 2 * (2 * 60 + 40)


def test_the_first_chunk_is_small_and_later_ones_are_not() -> None:
    utterance = Utterance("The juice of lemons makes fine punch, and so do oranges, cherries and old wine.")
    speak(utterance)
    seconds = [len(chunk) / 24000 for chunk in utterance.chunks]
    assert 0.1 < seconds[0] < 0.3
    assert seconds[1] > 2 * seconds[0]


def test_a_long_text_takes_one_sentence_a_step() -> None:
    state = talker_stage().admit(Utterance("This is one of many sentences. " * 2000).request())
    outputs = outputs_of(talker_stage().step([state])[0])
    assert [output.meta["first"] for output in outputs] == [True]
    assert not outputs[0].final


def test_a_text_without_words_is_the_callers_fault_and_fails_alone() -> None:
    for text in ("😀", "中文", "!?"):
        state = talker_stage().admit(Utterance(text).request())
        with pytest.raises(InvalidRequest) as caught:
            talker_stage().step([state])
        assert caught.value.param == "input"


def test_a_step_that_fails_for_one_row_can_be_run_again_for_the_others() -> None:
    (alone,) = speak(Utterance(TEXT, params=SAMPLED))
    good = talker_stage().admit(Utterance(TEXT, params=SAMPLED).request())
    bad = talker_stage().admit(Utterance("😀").request())
    with pytest.raises(InvalidRequest):
        talker_stage().step([good, bad])
    sound = code2wav_stage().admit(Utterance(TEXT, params=SAMPLED).request())
    pcm: list[Any] = []
    final = False
    while not final:
        for output in outputs_of(talker_stage().step([good])[0]):
            sound.inputs.append(Chunk("talker", output.meta, output.tensors, output.final))
        while sound.ready:
            (made,) = outputs_of(code2wav_stage().step([sound])[0])
            pcm.append(made.tensors["pcm"])
            final = made.final
    assert np.array_equal(np.concatenate(pcm), alone)


def test_an_unknown_voice_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        talker_stage().admit(StageRequest(0, {"text": "Hello.", "voice": "nobody"}, 0))
    assert caught.value.param == "voice"


def test_no_sentence_is_lost_between_the_stages() -> None:
    text = "One. Two. Three.\n\n😀\n\nFour, five. Six?"
    whole = speak(Utterance(text))[0]
    parts = speak(*map(Utterance, ["One.", "Two.", "Three.", "Four, five.", "Six?"]))
    assert len(whole) == sum(map(len, parts))


def test_sound_is_in_range_and_not_silent() -> None:
    for voice in ("heart", "robin", "wren", "crane", "rook", "owl"):
        (pcm,) = speak(Utterance(TEXT, voice))
        assert pcm.dtype == np.float32
        assert 0.05 < np.abs(pcm).max() < 1.0
