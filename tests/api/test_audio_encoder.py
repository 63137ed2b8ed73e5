from __future__ import annotations

import gc
import io
import struct

import av
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray
from serving import decode

from omni_async.api.audio_encoder import make_encoder, to_int16
from omni_async.api.media_plan import FORMATS, MediaPlan, plan_media
from omni_async.api.speech_fields import AudioFormat, SpeechFields
from omni_async.errors import InvalidRequest

RATE = 24000
# Samples of one codec frame, and what the container cannot take back, both at the coded rate.
FRAME = {"wav": 0, "pcm": 0, "flac": 0, "opus": 0, "mp3": 1152, "aac": 1024}
ADTS_PRIMING = 1024


def voice(samples: int, rate: int = RATE) -> NDArray[np.float32]:
    time = np.arange(samples) / rate
    return (0.3 * np.sin(2 * np.pi * 220 * time) + 0.2 * np.sin(2 * np.pi * 850 * time)).astype(np.float32)


def encode(
    pcm: NDArray[np.float32], fmt: AudioFormat, rate: int = RATE, *, streaming: bool, chunk: int = 6000
) -> list[bytes]:
    encoder = make_encoder(MediaPlan(format=fmt, source_rate=RATE, rate=rate), streaming=streaming)
    pieces = [encoder.push(pcm[at : at + chunk]) for at in range(0, len(pcm), chunk)]
    return [*pieces, encoder.finish()]


def decoded(data: bytes, fmt: AudioFormat, rate: int) -> tuple[NDArray[np.float32], int]:
    if fmt == "pcm":
        return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32767), rate
    return decode(data)


@pytest.mark.parametrize("samples", [1, 5999, 72007, 30720, 100_000])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_decodes_to_the_duration_of_the_audio(
    fmt: AudioFormat, streaming: bool, samples: int
) -> None:
    data = b"".join(encode(voice(samples), fmt, streaming=streaming))
    audio, rate = decoded(data, fmt, RATE)
    extra = len(audio) - samples * rate / RATE
    if fmt == "aac":  # ADTS cannot say that its first frame is priming
        extra -= ADTS_PRIMING
    padded = streaming or fmt == "aac" or samples < FRAME[fmt]
    assert 0 <= extra <= FRAME[fmt] * padded


@pytest.mark.parametrize("rate", [8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000])
@pytest.mark.parametrize("fmt", ["mp3", "aac", "flac", "wav"])
def test_rates_that_a_format_carries_come_back_from_its_decoder(fmt: AudioFormat, rate: int) -> None:
    audio, found = decode(b"".join(encode(voice(48000), fmt, rate, streaming=True)))
    assert found == rate
    assert abs(len(audio) / rate - 2) < 2 * 1152 / rate + ADTS_PRIMING / rate


@pytest.mark.parametrize("fmt", ["mp3", "aac", "opus", "flac"])
def test_what_is_heard_is_what_was_encoded(fmt: AudioFormat) -> None:
    pcm = voice(48000)
    audio, rate = decode(b"".join(encode(pcm, fmt, streaming=True)))
    step = rate // RATE
    start = ADTS_PRIMING if fmt == "aac" else 0
    heard = audio[start::step][: len(pcm)]
    error = np.sqrt(np.mean((heard[2000:-2000] - pcm[2000:-2000]) ** 2) / np.mean(pcm**2))
    assert error < {"flac": 1e-4, "opus": 0.1, "mp3": 0.1, "aac": 0.1}[fmt]


@pytest.mark.parametrize("fmt", FORMATS)
def test_bytes_leave_a_streaming_encoder_while_more_audio_is_to_come(fmt: AudioFormat) -> None:
    pieces = encode(voice(RATE * 3), fmt, streaming=True)
    assert all(pieces[:2]), "each quarter of a second gives bytes"
    assert sum(map(len, pieces[:-1])) > 0.7 * sum(map(len, pieces))


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100, 48000])
def test_resampling_by_chunks_leaves_no_seam(rate: int) -> None:
    pcm = voice(50_001)
    whole = np.frombuffer(b"".join(encode(pcm, "pcm", rate, streaming=True, chunk=len(pcm))), "<i2")
    chunked = np.frombuffer(b"".join(encode(pcm, "pcm", rate, streaming=True, chunk=997)), "<i2")
    assert len(whole) == len(chunked)
    assert abs(len(whole) - len(pcm) * rate / RATE) <= 1
    assert int(np.abs(whole.astype(int) - chunked.astype(int)).max()) <= 1


def test_loud_audio_is_clipped_and_samples_are_rounded_to_nearest() -> None:
    pcm = np.array([2.0, -2.0, 1.0, -1.0, 0.6 / 32767, -0.6 / 32767, 0.4 / 32767], np.float32)
    assert to_int16(pcm).tolist() == [32767, -32767, 32767, -32767, 1, -1, 0]


def test_a_wav_file_has_true_sizes_and_a_stream_has_one_header_with_unknown_ones() -> None:
    pcm = voice(RATE)
    whole = b"".join(encode(pcm, "wav", streaming=False))
    stream = b"".join(encode(pcm, "wav", streaming=True))
    assert struct.unpack_from("<I", whole, 4)[0] == len(whole) - 8
    assert struct.unpack_from("<I", whole, 40)[0] == len(whole) - 44 == 2 * RATE
    assert struct.unpack_from("<I", stream, 4)[0] == struct.unpack_from("<I", stream, 40)[0] == 0xFFFFFFFF
    assert stream.count(b"RIFF") == 1
    assert stream[44:] == whole[44:]


def test_flac_and_mp3_files_tell_their_duration_in_the_header() -> None:
    for fmt in ("flac", "mp3"):
        data = b"".join(encode(voice(RATE * 2), fmt, streaming=False))
        with av.open(io.BytesIO(data), "r") as container:
            assert container.duration == 2_000_000


def test_a_rate_that_the_format_cannot_carry_is_refused_with_those_it_can() -> None:
    with pytest.raises(InvalidRequest, match="44100, 48000") as caught:
        plan_media(SpeechFields(response_format="mp3", sample_rate=12345), RATE)
    assert caught.value.param == "sample_rate"


def test_opus_is_resampled_to_48_khz_where_it_must_be() -> None:
    assert plan_media(SpeechFields(response_format="opus", sample_rate=22050), RATE).rate == 48000
    assert plan_media(SpeechFields(response_format="opus"), RATE).rate == RATE
    assert plan_media(SpeechFields(response_format="opus"), 44100).rate == 48000


@pytest.mark.parametrize("fmt", ["mp3", "aac", "opus", "flac"])
def test_abandoned_encoders_leave_nothing_behind(fmt: AudioFormat) -> None:
    plan = MediaPlan(format=fmt, source_rate=RATE, rate=RATE)
    pcm = voice(6000)
    process = psutil.Process()

    def abandon(times: int) -> None:
        for _ in range(times):
            encoder = make_encoder(plan, streaming=True)
            encoder.push(pcm)
            encoder.close()
            del encoder

    gc.disable()  # an unclosed flac encoder holds 0.8 MB until the collector runs
    try:
        abandon(50)
        before = process.memory_info().rss
        abandon(300)
        assert process.memory_info().rss - before < 4 * 1024 * 1024
    finally:
        gc.enable()
