"""The built-in voice beside the package that it is made of."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hibari import Hibari, dsp
from numpy.typing import NDArray

from omni_async.stages.models.hibari.decoder import LOOKAHEAD, Decoder, DecoderState
from omni_async.stages.models.hibari.noise import FrameNoise
from omni_async.stages.models.hibari.package_model import load_graph, model_path
from omni_async.stages.models.hibari.prosody import Prosody
from omni_async.stages.models.hibari.spectra import Spectra
from omni_async.stages.models.hibari.vocoder import Noise, Vocoder
from tests.hibari_stages import Floats, Utterance, signal_to_noise, speak, talk

synthesize: Any = dsp.synth

LONG = (
    "The quick brown fox jumped over the lazy dog while seventeen curious children watched quietly from "
    "the old wooden bridge."
)
TEXTS = [
    "Hello.",
    LONG,
    "One. Two, three! It is Dr. Smith's 3.5 kg cat; isn't it? Yes.",
    "First line\nSecond line, on the 3rd of March 2024, for $9.99",
]


@cache
def package() -> Any:
    return Hibari(threads=1)


@cache
def prosody() -> Prosody:
    return Prosody(load_graph(model_path()), "cpu")


@cache
def decoder() -> Decoder:
    return Decoder(load_graph(model_path()), "cpu")


def package_maps(ids: list[int], speed: float = 1.0) -> list[Floats]:
    """The five maps [n, 601] and the pitch [n] that the package's network gives."""
    feed = {"ids": np.array([ids]), "speed": np.array([speed], np.float32)}
    return [np.ascontiguousarray(out[0].T) for out in package().sess.run(None, feed)]


def ids_of(text: str) -> list[int]:
    return package().ids(package().phonemize(text)[0])


def frames_of(text: str) -> tuple[Floats, Floats]:
    frames = prosody().speak(ids_of(text), 1.0)
    return frames.values, frames.pitch


def pieces(total: int, sizes: list[int]) -> list[slice]:
    """Slices of `sizes` that cover `total`, the last size repeated."""
    found, at = list[slice](), 0
    while at < total:
        size = sizes[min(len(found), len(sizes) - 1)]
        found.append(slice(at, min(at + size, total)))
        at += size
    return found


def decode(values: Floats, sizes: list[int]) -> Spectra:
    """In chunks of `sizes`."""
    state, parts = DecoderState(), list[Spectra]()
    for piece in pieces(len(values), sizes):
        spectra, state = decoder().advance(state, values[piece], last=piece.stop == len(values))
        parts.append(spectra)
    return join(*parts)


def join(*parts: Spectra) -> Spectra:
    """The parts, one after the other."""
    return Spectra(*map(np.concatenate, zip(*(part.maps for part in parts), strict=True)))


def as_logarithms(spectra: Spectra) -> list[Floats]:
    """The maps [601, n] as the package's synthesis takes them."""
    turned = np.arctanh(np.clip(spectra.harmonic_phase / np.pi, -1 + 1e-6, 1 - 1e-6))
    logs = [np.log(m) for m in (spectra.harmonic, spectra.noise, spectra.free)]
    return [np.ascontiguousarray(m.T) for m in (logs[0], turned, logs[1], logs[2], spectra.free_phase)]


def package_noise(seed: int, frames: int) -> Noise:
    """The noise that the package draws for a sentence of `frames`."""
    drawn = np.random.default_rng(seed).standard_normal((601, 2 * frames), dtype=np.float32)
    left: list[NDArray[np.complex64]] = [drawn.view(np.complex64).T]

    def take(count: int) -> NDArray[np.complex64]:
        taken, left[0] = left[0][:count], left[0][count:]
        return np.ascontiguousarray(taken)

    return take


def vocode(spectra: Spectra, pitch: Floats, noise: Noise, sizes: list[int], ahead: int = 27) -> Floats:
    """In chunks of `sizes`, with the pitch `ahead` of the spectra."""
    vocoder, parts, known = Vocoder(), list[Floats](), 0
    for piece in pieces(len(pitch), sizes):
        some, last = Spectra(*(m[piece] for m in spectra.maps)), piece.stop == len(pitch)
        new = pitch[known:] if last else pitch[known : piece.stop + ahead]
        known += len(new)
        parts.append(vocoder.push(some, new, noise, last=last))
    return np.concatenate(parts)


@pytest.mark.parametrize("speed", [0.5, 1.0, 1.3, 2.0])
def test_timing_and_pitch_are_the_packages_own_bit_for_bit(speed: float) -> None:
    for text in TEXTS:
        outputs = talk(Utterance(text, params={"speed": speed}))
        ours = np.concatenate([output.tensors["pitch"] for output in outputs])
        theirs = [package_maps(package().ids(ps), speed)[5] for ps in package().phonemize(text)]
        assert np.array_equal(ours, np.concatenate(theirs))


def test_pitch_at_another_speed_is_not_the_packages() -> None:
    ours = np.concatenate([output.tensors["pitch"] for output in talk(Utterance(LONG))])
    assert not np.array_equal(ours, package_maps(ids_of(LONG), 1.1)[5])


@pytest.mark.parametrize("sizes", [[47, 80, 160], [LOOKAHEAD + 1, 2, 3, 4], [100], [64, 7]])
def test_decoding_in_chunks_is_decoding_whole_bit_for_bit(sizes: list[int]) -> None:
    values, _ = frames_of(LONG)
    whole, chunked = decode(values, [len(values)]), decode(values, sizes)
    assert all(map(np.array_equal, whole.maps, chunked.maps))


def test_a_lost_tail_would_show() -> None:
    values, _ = frames_of(LONG)
    whole = decode(values, [len(values)])
    in_two = join(decode(values[:100], [100]), decode(values[100:], [len(values)]))
    assert np.abs(np.log(whole.noise) - np.log(in_two.noise)).max() > 0.5


def test_spectra_are_the_packages_to_its_own_precision() -> None:
    # The package quantizes by sentence, this decoder by frame: both err, by a like amount.
    values, _ = frames_of(LONG)
    ours, theirs = as_logarithms(decode(values, [160])), package_maps(ids_of(LONG))[:5]
    for mine, reference in zip(ours, theirs, strict=True):
        assert np.sqrt(np.mean((mine.T - reference) ** 2)) < 0.15
        assert np.sqrt(np.mean((mine.T[1:] - reference[:-1]) ** 2)) > 0.15


@pytest.mark.parametrize("sizes", [[10**6], [20, 80, 160], [1, 1, 1, 1, 1, 5], [30]])
def test_sound_in_chunks_is_the_packages_synthesis(sizes: list[int]) -> None:
    values, pitch = frames_of(LONG)
    spectra = decode(values, [160])
    theirs = synthesize(*as_logarithms(spectra), pitch, np.random.default_rng(5))
    ours = vocode(spectra, pitch, package_noise(5, len(pitch)), sizes)
    assert len(ours) == len(theirs)
    assert np.abs(ours - theirs).max() < 1e-4


def test_sound_needs_the_pitch_ahead_of_it() -> None:
    values, pitch = frames_of(LONG)
    spectra = decode(values, [160])
    expected = vocode(spectra, pitch, FrameNoise(5), [50], ahead=27)
    assert np.abs(vocode(spectra, pitch, FrameNoise(5), [50], ahead=2) - expected).max() < 1e-6
    with pytest.raises(ValueError, match="not known yet"):
        vocode(spectra, pitch, FrameNoise(5), [50], ahead=1)


def test_other_noise_would_show() -> None:
    values, pitch = frames_of(LONG)
    spectra = decode(values, [160])
    theirs = synthesize(*as_logarithms(spectra), pitch, np.random.default_rng(5))
    assert np.abs(vocode(spectra, pitch, FrameNoise(5), [160]) - theirs).max() > 1e-3


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5])
def test_the_shortest_sentences_have_sound_of_their_length(frames: int) -> None:
    values, pitch = frames_of("Hello.")
    spectra = decode(values[:frames], [frames])
    theirs = synthesize(*as_logarithms(spectra), pitch[:frames], np.random.default_rng(5))
    ours = vocode(spectra, pitch[:frames], package_noise(5, frames), [frames])
    assert len(ours) == 300 * frames
    assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("speed", [1.0, 1.5])
def test_speech_is_the_packages_within_its_quantization(text: str, speed: float) -> None:
    theirs = package()(text, speed=speed, seed=3)
    (ours,) = speak(Utterance(text, params={"speed": speed}))
    assert len(ours) == len(theirs)
    assert signal_to_noise(theirs, ours) > 18


def test_speech_a_millisecond_late_would_show() -> None:
    theirs = package()(LONG, seed=3)
    (ours,) = speak(Utterance(LONG))
    assert signal_to_noise(theirs[24:], ours[:-24]) < 10
