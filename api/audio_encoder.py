"""Streaming audio encoders: float32 chunks in, bytes of one format out.

This module loads numpy, soxr and PyAV; `media_pool.py` imports it when a server that speaks starts.
Encoders are used by one thread at a time and hold all their state.
"""

# PyAV's and soxr's own types are partial.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import io
import struct
from fractions import Fraction
from typing import Protocol

import av
import numpy as np
import soxr
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.packet import Packet
from numpy.typing import NDArray

from omni_async.api.media_plan import MediaPlan

Float = NDArray[np.float32]
UNKNOWN_SIZE = 0xFFFFFFFF


class AudioEncoder(Protocol):
    """`push` chunks `[samples]`, then `finish` once; the answers joined are the file."""

    def push(self, pcm: Float) -> bytes:
        """Bytes that are ready after `pcm`; may be empty."""
        ...

    def finish(self) -> bytes:
        """The rest, container closed."""
        ...

    def close(self) -> None:
        """Free what an unfinished encoder holds. Nothing may follow; safe to call again."""
        ...


def make_encoder(plan: MediaPlan, *, streaming: bool) -> AudioEncoder:
    """The encoder for `plan`.

    A streaming one gives bytes with every chunk and never goes back; a whole-file one gives all of them
    at the end, with exact sizes and durations in the header where the format has such fields.
    """
    encoder: AudioEncoder
    if plan.format == "pcm":
        encoder = PcmEncoder()
    elif plan.format == "wav":
        encoder = WavEncoder(plan.rate, streaming=streaming)
    else:
        encoder = ContainerEncoder(plan, streaming=streaming)
    return encoder if plan.rate == plan.source_rate else Resampled(encoder, plan.source_rate, plan.rate)


def to_int16(pcm: Float) -> NDArray[np.int16]:
    """Little-endian 16-bit samples, rounded to nearest; what is outside [-1, 1] is clipped."""
    return np.rint(np.clip(pcm, -1.0, 1.0) * 32767.0).astype("<i2")


class PcmEncoder:
    """Bare samples."""

    def push(self, pcm: Float) -> bytes:
        """The samples of `pcm`."""
        return to_int16(pcm).tobytes()

    def finish(self) -> bytes:
        """Nothing."""
        return b""

    def close(self) -> None:
        """Nothing to free."""


class WavEncoder:
    """RIFF/WAVE, 16 bit mono. While streaming, the sizes in the header are `UNKNOWN_SIZE`."""

    def __init__(self, rate: int, *, streaming: bool) -> None:
        self._rate = rate
        self._streaming = streaming
        self._parts: list[bytes] = []
        self._begun = False

    def push(self, pcm: Float) -> bytes:
        """The samples of `pcm`, after the header the first time."""
        data = to_int16(pcm).tobytes()
        if not self._streaming:
            self._parts.append(data)
            return b""
        return self._head() + data

    def _head(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return wav_header(self._rate, UNKNOWN_SIZE)

    def finish(self) -> bytes:
        """The whole file, or nothing more of a stream."""
        if self._streaming:
            return self._head()
        data = b"".join(self._parts)
        return wav_header(self._rate, len(data)) + data

    def close(self) -> None:
        """Forget the samples."""
        self._parts.clear()


def wav_header(rate: int, size: int) -> bytes:
    """The 44 bytes before `size` bytes of 16-bit mono samples."""
    riff_size = size if size == UNKNOWN_SIZE else size + 36
    head = struct.pack("<4sI4s", b"RIFF", riff_size, b"WAVE")
    head += struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, rate * 2, 2, 16)
    return head + struct.pack("<4sI", b"data", size)


class Resampled:
    """Feeds an encoder at another rate; the resampler keeps its state, so chunk edges leave no seam."""

    def __init__(self, encoder: AudioEncoder, source_rate: int, rate: int) -> None:
        self._encoder = encoder
        self._resampler = soxr.ResampleStream(source_rate, rate, 1, dtype="float32", quality="HQ")

    def push(self, pcm: Float) -> bytes:
        """What the encoder makes of the samples that are certain after `pcm`."""
        return self._encoder.push(self._resampler.resample_chunk(pcm))

    def finish(self) -> bytes:
        """The resampler's tail, and the rest of the file."""
        tail = self._resampler.resample_chunk(np.zeros(0, np.float32), last=True)
        return self._encoder.push(tail) + self._encoder.finish()

    def close(self) -> None:
        """Free the encoder."""
        self._encoder.close()


class _Codec:
    """How PyAV writes one format. Bit rates are in bit/s; 0 leaves it to the codec."""

    def __init__(
        self, container: str, codec: str, sample_format: str, bits_per_sample: int, most: int
    ) -> None:
        self.container = container
        self.codec = codec
        self.sample_format = sample_format
        self._bits_per_sample = bits_per_sample
        self._most = most

    def bit_rate(self, rate: int) -> int:
        """Speech-transparent, within what the codec allows at low sample rates."""
        return min(self._most, rate * self._bits_per_sample)


_CODECS = {
    "mp3": _Codec("mp3", "libmp3lame", "s16p", 8, 128_000),
    "aac": _Codec("adts", "aac", "fltp", 5, 96_000),
    "opus": _Codec("ogg", "libopus", "flt", 8, 64_000),
    "flac": _Codec("flac", "flac", "s16", 0, 0),
}
# How far LAME's output and a decoder's lag; in a whole decoded signal the first sample lies at their sum.
_LAME_DELAY = 576
_MP3_DECODER_DELAY = 529
# From the word "Xing" to the encoder delay: flags, frames, bytes, 100 bytes of contents, quality, version.
_XING_TO_DELAY = 141
_FLUSH = {"flush_packets": "1"}
_CONTAINER_OPTIONS = {"ogg": {**_FLUSH, "page_duration": "20000"}}


class ContainerEncoder:
    """mp3, AAC in ADTS, Opus in Ogg, or FLAC, by PyAV.

    Decoded durations: flac and opus exact. mp3 exact as a file of a frame or more (its tag has delay and
    padding); streamed, the tag has the delay, and the end is padded by less than one codec frame. ADTS has
    no place for either: decoders play a frame (1024 samples) of priming, and padding to a whole frame.
    """

    def __init__(self, plan: MediaPlan, *, streaming: bool) -> None:
        self._plan = plan
        self._codec = _CODECS[plan.format]
        self._sink = _Stream() if streaming else io.BytesIO()
        self._output: tuple[OutputContainer, AudioStream] | None = None
        self._samples = 0
        self._packets = 0
        self._tagged = False

    def push(self, pcm: Float) -> bytes:
        """The bytes that the codec lets go of; empty for a whole file."""
        if not len(pcm):
            return b""
        container, stream = self._open()
        for packet in stream.encode(self._frame(pcm)):
            self._mux(container, packet)
        return self._take()

    def finish(self) -> bytes:
        """The codec flushed and the container closed."""
        container, stream = self._open()
        for packet in stream.encode(None):
            if not self._is_padding(stream):
                self._mux(container, packet)
        container.close()
        self._output = None
        return self._sink.getvalue() if isinstance(self._sink, io.BytesIO) else self._take()

    def close(self) -> None:
        """Close the container; PyAV's objects refer to each other, and would wait for the collector."""
        if self._output is not None:
            self._output[0].close()
            self._output = None

    def _open(self) -> tuple[OutputContainer, AudioStream]:
        if self._output is None:
            codec, rate = self._codec, self._plan.rate
            options = _CONTAINER_OPTIONS.get(codec.container, _FLUSH)
            container = av.open(self._sink, "w", format=codec.container, options=options)
            stream = container.add_stream(codec.codec, rate=rate, layout="mono", format=codec.sample_format)
            assert isinstance(stream, AudioStream)
            stream.time_base = Fraction(1, rate)
            if bit_rate := codec.bit_rate(rate):
                stream.bit_rate = bit_rate
            self._output = container, stream
        return self._output

    def _frame(self, pcm: Float) -> av.AudioFrame:
        planes = pcm[None] if self._codec.sample_format.startswith("flt") else to_int16(pcm)[None]
        frame = av.AudioFrame.from_ndarray(planes, format=self._codec.sample_format, layout="mono")
        frame.sample_rate = self._plan.rate
        frame.time_base = Fraction(1, self._plan.rate)
        frame.pts = self._samples
        self._samples += len(pcm)
        return frame

    def _mux(self, container: OutputContainer, packet: Packet[AudioStream]) -> None:
        container.mux(packet)
        self._packets += 1

    def _is_padding(self, stream: AudioStream) -> bool:
        # A decoder trims within the last frame only, so frames of nothing but padding are left out.
        if self._plan.format != "mp3":
            return False
        frame_size = stream.codec_context.frame_size
        return self._packets * frame_size >= self._samples + _LAME_DELAY + _MP3_DECODER_DELAY

    def _take(self) -> bytes:
        if isinstance(self._sink, io.BytesIO):
            return b""
        data = self._sink.take()
        if self._tagged or not data or self._plan.format != "mp3":
            return data
        self._tagged = True
        return with_encoder_delay(data)


def with_encoder_delay(head: bytes) -> bytes:
    """The head of an mp3 stream, its tag saying how far LAME's output lags.

    The muxer writes the tag first and the delay into it last, when a stream has been sent long since.
    """
    at = head.find(b"Xing")
    if at < 0:
        return head
    at += _XING_TO_DELAY
    return head[:at] + (_LAME_DELAY << 12).to_bytes(3, "big") + head[at + 3 :]


class _Stream(io.RawIOBase):
    """What a muxer writes, taken away piece by piece.

    It lets the muxer seek, because the mp3 muxer writes the tag with the encoder's delay only then, but
    what is rewritten after the fact is dropped: those bytes have been sent.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._taken = 0
        self._at = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        end = self._taken + len(self._data)
        self._data += bytes(data)[max(0, end - self._at) :]
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._taken + len(self._data))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def take(self) -> bytes:
        """The bytes since the last call."""
        data = bytes(self._data)
        self._taken += len(data)
        self._data.clear()
        return data
