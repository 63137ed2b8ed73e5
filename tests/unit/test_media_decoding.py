"""Decoding what strangers send: right where it is right, refused with a sentence where it is not."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from omni_async.api import media_decoding
from omni_async.api.media_decoding import decode_audio, decode_video
from omni_async.errors import InvalidRequest
from tests.media_files import CODECS, film_file, sound_file


def pitch(sound: NDArray[np.float32], rate: int) -> float:
    return float(np.abs(np.fft.rfft(sound)).argmax() * rate / len(sound))


@pytest.mark.parametrize("kind", CODECS)
def test_every_container_gives_the_sound_at_the_rate_that_is_wanted(kind: str) -> None:
    sound = decode_audio(sound_file(kind), rate=16000, max_seconds=5)
    assert sound.dtype == np.float32 and sound.ndim == 1
    assert abs(len(sound) - 16000) < 1500
    assert abs(pitch(sound, 16000) - 440) < 3
    assert 0.4 < np.abs(sound).max() < 0.6


def test_a_declared_format_must_be_the_files_own() -> None:
    assert len(decode_audio(sound_file("mp3"), rate=16000, max_seconds=5, format="mp3"))
    for declared in ("wav", "midi"):
        with pytest.raises(InvalidRequest, match=declared):
            decode_audio(sound_file("mp3"), rate=16000, max_seconds=5, format=declared)


def test_a_sound_that_is_too_long_is_not_decoded_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sound_file("flac", seconds=60, rate=8000)
    read: list[int] = []
    resampler = media_decoding.av.AudioResampler

    class Counting:
        def __init__(self, **how: Any) -> None:
            self._inner = resampler(**how)

        def resample(self, frame: Any) -> Any:
            read.append(frame.samples)
            return self._inner.resample(frame)

    monkeypatch.setattr(media_decoding.av, "AudioResampler", Counting)
    with pytest.raises(InvalidRequest, match="longer than 3 s"):
        decode_audio(data, rate=16000, max_seconds=3)
    assert sum(read) < 6 * 8000


def test_pictures_are_taken_at_even_distances() -> None:
    video = decode_video(film_file(50, rate=25), max_frames=16, fps=2.0, max_pixels=10_000)
    assert video.frames.shape == (4, 48, 64, 3) and video.fps == 2.0
    levels = video.frames.mean((1, 2, 3))
    np.testing.assert_allclose(levels, [0, 4 * 13, 4 * 25, 4 * 38], atol=6)


def test_a_long_film_is_looked_at_less_often() -> None:
    video = decode_video(film_file(200, rate=10), max_frames=8, fps=2.0, max_pixels=10_000)
    assert 4 <= len(video.frames) <= 8 and video.fps in (0.25, 0.5)
    assert abs(len(video.frames) / video.fps - 20) <= 4


def test_large_pictures_are_scaled_down_and_larger_ones_refused() -> None:
    data = film_file(3, size=(1280, 960))
    video = decode_video(data, max_frames=4, fps=2.0, max_pixels=2_000_000)
    height, width = video.frames.shape[1:3]
    assert height * width <= media_decoding.FRAME_PIXELS and abs(width / height - 4 / 3) < 0.02
    with pytest.raises(InvalidRequest, match="1280x960"):
        decode_video(data, max_frames=4, fps=2.0, max_pixels=1_000_000)


def test_a_film_of_too_many_pictures_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_decoding, "MAX_PICTURES", 20)
    with pytest.raises(InvalidRequest, match="more than 20 pictures"):
        decode_video(film_file(30), max_frames=4, fps=2.0, max_pixels=10_000)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read"),
        (b"RIFF\x00\x00\x00\x00WAVE", "cannot be read|no audio|empty"),
        (b"nonsense" * 100, "cannot be read"),
        (film_file(3), "no audio"),
        (sound_file()[:44], "empty|cannot be read"),
    ],
)
def test_what_is_no_sound_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decode_audio(data, rate=16000, max_seconds=5)


def test_what_is_no_film_is_refused() -> None:
    for data, message in ((sound_file("mp4"), "no video"), (b"x" * 99, "cannot be read")):
        with pytest.raises(InvalidRequest, match=message):
            decode_video(data, max_frames=4, fps=2.0, max_pixels=10_000)


def test_samples_that_are_no_numbers_are_refused() -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="wav") as container:
        stream: Any = container.add_stream("pcm_f32le", rate=16000)
        stream.layout = "mono"
        bad = np.full((1, 1600), np.nan, np.float32)
        frame = av.AudioFrame.from_ndarray(bad, format="flt", layout="mono")
        frame.rate = 16000
        container.mux(stream.encode(frame))
    with pytest.raises(InvalidRequest, match="no numbers"):
        decode_audio(file.getvalue(), rate=16000, max_seconds=5)


def test_a_playlist_cannot_name_files_of_the_server(tmp_path: Path) -> None:
    secret = tmp_path / "secret.wav"
    secret.write_bytes(sound_file())
    playlists = [
        f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10.0,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile '{secret}'\n",
        f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10.0,\n{secret}\n#EXT-X-ENDLIST\n",
    ]
    for playlist in playlists:
        with pytest.raises(InvalidRequest):
            decode_audio(playlist.encode(), rate=16000, max_seconds=5)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400), st.sampled_from(list(CODECS)), st.integers(0, 400))
def test_damaged_files_are_read_or_refused_and_never_worse(noise: bytes, kind: str, at: int) -> None:
    data = bytearray(SOUNDS[kind])
    data[at : at + len(noise)] = noise
    for given_bytes in (bytes(data), noise, bytes(data[: len(data) // 2])):
        try:
            sound = decode_audio(given_bytes, rate=16000, max_seconds=5)
        except InvalidRequest:
            continue
        assert np.isfinite(sound).all() and np.abs(sound).max() <= 1.0


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 3000))
def test_damaged_films_are_read_or_refused_and_never_worse(noise: bytes, at: int) -> None:
    data = bytearray(FILM)
    data[at : at + len(noise)] = noise
    try:
        video = decode_video(bytes(data), max_frames=4, fps=2.0, max_pixels=10_000)
    except InvalidRequest:
        return
    assert 1 <= len(video.frames) <= 4 and video.frames.dtype == np.uint8


SOUNDS = {kind: sound_file(kind, seconds=0.2) for kind in CODECS}
FILM = film_file(8)
