"""A validated speech request and its way from text to encoded bytes; all speech routes share it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from omni_async.api.client import Chunk, OmniClient
from omni_async.api.config import ApiConfig
from omni_async.api.media_plan import MediaPlan, plan_media
from omni_async.api.media_pool import Encoding, MediaPool
from omni_async.api.speech_fields import SpeechFields, speech_of
from omni_async.errors import InvalidRequest, StageFailed
from omni_async.outputs import AudioChunk
from omni_async.speech import Speech


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request used, in OpenAI's shape.

    `input_tokens` counts the characters of `input`, `output_tokens` the begun 50 ms of audio: a model's
    own tokens are not known here, and differ from model to model.
    """

    input_tokens: int
    output_tokens: int
    total_tokens: int
    audio_seconds: float


class SpeechJob(msgspec.Struct, frozen=True):
    """What is asked of the engine, and the bytes that its audio becomes."""

    speech: Speech
    plan: MediaPlan

    def usage(self, samples: int) -> Usage:
        """What the request used, `samples` being its audio at the model's own rate."""
        characters, rate = len(self.speech.input), self.plan.source_rate
        units = -(-samples * 20 // rate)
        return Usage(
            input_tokens=characters,
            output_tokens=units,
            total_tokens=characters + units,
            audio_seconds=round(samples / rate, 6),
        )


class SpeechService:
    """Checks requests against what is served, and runs them."""

    def __init__(self, omni: OmniClient, config: ApiConfig, media: MediaPool) -> None:
        self.omni = omni
        self.config = config
        self.media = media

    def prepare(self, fields: SpeechFields, text: str, *, gapless: bool) -> SpeechJob:
        """The job for `text`. Raises `InvalidRequest` or `NotFound` before any stage is asked."""
        if len(text) > self.config.max_input_chars:
            limit = self.config.max_input_chars
            message = f"input has {len(text)} characters; at most {limit} are taken."
            raise InvalidRequest(message, param="input", code="input_too_long")
        pipeline = self.omni.pipeline_for("speech", fields.model)
        if pipeline.speech is None:
            raise InvalidRequest(f"Model {pipeline.name!r} does not speak.", param="model")
        speech = speech_of(fields, text, gapless=gapless)
        speech.resolve(pipeline.speech)
        return SpeechJob(speech, plan_media(fields, pipeline.speech.sample_rate))

    def run(self, job: SpeechJob, request_id: str, *, streaming: bool) -> SpeechRun:
        """Start `job` when the answer is first iterated."""
        return SpeechRun(self, job, request_id, streaming=streaming)


class SpeechRun:
    """One job under way: encoded bytes as they are made. `samples` is the audio heard of so far."""

    def __init__(self, service: SpeechService, job: SpeechJob, request_id: str, *, streaming: bool) -> None:
        self._service = service
        self._job = job
        self._request_id = request_id
        self._streaming = streaming
        self.samples = 0

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Non-empty pieces of the file; closing the generator cancels the request."""
        encoding = self._service.media.encoding(self._job.plan, streaming=self._streaming)
        chunks = self._service.omni.generate(self._job.speech, request_id=self._request_id)
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    if data := await self._encode(encoding, chunk):
                        yield data
            if not self.samples:
                raise StageFailed("The model made no audio for this text.")
            if tail := await encoding.finish():
                yield tail
        finally:
            encoding.close()

    async def _encode(self, encoding: Encoding, chunk: Chunk) -> bytes:
        assert isinstance(chunk, AudioChunk)
        data = await encoding.push(chunk.pcm)
        self.samples = encoding.samples
        return data

    async def whole(self) -> bytes:
        """The complete file."""
        async with aclosing(self.pieces()) as pieces:
            return b"".join([piece async for piece in pieces])
