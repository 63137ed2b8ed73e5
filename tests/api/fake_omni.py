"""A scripted engine client: it speaks sine tones, and tells what became of every request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omni_async.api.client import Chunk, Request
from omni_async.config import ImageConfig, PipelineConfig, SpeechConfig, StageConfig
from omni_async.echo import Echo
from omni_async.errors import EngineDead, InvalidRequest, NotFound
from omni_async.image import Image
from omni_async.outputs import AudioChunk, ImageChunk, TextChunk
from omni_async.speech import Speech
from omni_async.status import FinishReason, Health, ReplicaStatus, RequestRecord, StageStatus

RATE = 24000
CHUNK = 6000

SPEECH = PipelineConfig(
    name="tone-tts",
    aliases=("tts-1",),
    stages=(StageConfig(stage_id=0, name="tone", kind="tone", final_output=True),),
    speech=SpeechConfig(
        voices=("heart", "Deep"),
        default_voice="heart",
        voice_aliases={"alloy": "heart"},
        sample_rate=RATE,
        fields=("speed", "language"),
        extra_params={"temperature": {"type": "float", "ge": 0.0, "le": 2.0}},
    ),
)
ECHO = PipelineConfig(
    name="echo", stages=(StageConfig(stage_id=0, name="echo", kind="echo", final_output=True),), echo=True
)

IMAGE = PipelineConfig(
    name="patch",
    aliases=("gpt-image-1",),
    stages=(StageConfig(stage_id=0, name="patch", kind="patch", final_output=True),),
    image=ImageConfig(
        default_size="64x64",
        max_side=512,
        upscaled_sizes={"1024x1024": "512x512"},
        fields=("negative_prompt", "guidance_scale", "strength", "mask_image", "lora"),
        max_images=2,
    ),
)
STEPS = 4


def patch(prompt: str, seed: int, width: int, height: int) -> NDArray[np.uint8]:
    """The picture of `prompt`: one colour, and the seed in its corner; RGBA where it asks for glass."""
    pixels = np.full((height, width, 4 if "glass" in prompt else 3), sum(map(ord, prompt)) % 200, np.uint8)
    pixels[:8, :8] = seed % 256
    if "glass" in prompt:
        pixels[..., 3] = 0
    return pixels


def tone(text: str) -> NDArray[np.float32]:
    """The audio of `text`, float32 `[samples]`: 1700 samples a character, of a pitch of its own."""
    samples = 1700 * len(text) + 7
    pitch = 200 + 10 * (sum(map(ord, text)) % 40)
    return (0.4 * np.sin(2 * np.pi * pitch / RATE * np.arange(samples))).astype(np.float32)


@dataclass
class Seen:
    """A request that the engine was given."""

    request: Request
    request_id: str | None
    chunks: int = 0
    outcome: FinishReason | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


BeforeChunk = Callable[[Seen], Awaitable[None]]


class FakeOmni:
    """Implements `OmniClient`. `before_chunk` is awaited ahead of each chunk: it may wait, or raise."""

    def __init__(self, *pipelines: PipelineConfig) -> None:
        self.pipelines = pipelines or (SPEECH, ECHO, IMAGE)
        self.started = False
        self.starts = 0
        self.closes = 0
        self.ready = True
        self.seen: list[Seen] = []
        self.audio: Callable[[str], NDArray[np.float32]] = tone
        self.before_chunk: BeforeChunk | None = None
        self.arrived = asyncio.Event()
        self._observers: list[Callable[[RequestRecord], None]] = []

    async def start(self) -> None:
        self.starts += 1
        self.started = True

    async def close(self) -> None:
        self.closes += 1
        self.started = False

    def pipeline_for(self, kind: str, model: str | None) -> PipelineConfig:
        for pipeline in self.pipelines:
            able = bool(getattr(pipeline, kind))
            if model is None and able:
                return pipeline
            if model in (pipeline.name, *pipeline.aliases):
                if not able:
                    raise InvalidRequest(f"{model} does not do {kind}.", param="model")
                return pipeline
        raise NotFound(f"Unknown model {model!r}.", param="model", code="model_not_found")

    async def generate(
        self, request: Request, *, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        if not self.started:
            raise EngineDead("AsyncOmni is not started.")
        seen = Seen(request, request_id)
        self.seen.append(seen)
        self.arrived.set()
        seen.outcome = "abort"
        try:
            for chunk in self._chunks(request, request_id or ""):
                if self.before_chunk is not None:
                    await self.before_chunk(seen)
                seen.chunks += 1
                yield chunk
            seen.outcome = "stop"
        except Exception:
            seen.outcome = "failed"
            raise
        finally:
            seen.ended.set()
            self._record(seen)

    def _chunks(self, request: Request, request_id: str) -> Sequence[Chunk]:
        if isinstance(request, Echo):
            return [TextChunk(request_id, part) for part in _parts(request.text, request.chunks)]
        if isinstance(request, Image):
            return self._pictures(request, request_id)
        assert isinstance(request, Speech)
        pipeline = self.pipeline_for("speech", request.model)
        assert pipeline.speech is not None
        request.resolve(pipeline.speech)
        pcm = self.audio(request.input)
        return [AudioChunk(request_id, pcm[at : at + CHUNK], RATE) for at in range(0, len(pcm), CHUNK)]

    def _pictures(self, request: Image, request_id: str) -> list[ImageChunk]:
        pipeline = self.pipeline_for("image", request.model)
        assert pipeline.image is not None and request.seed is not None
        params = request.resolve(pipeline.image)
        width, height = params.get("upscale_to", (params["width"], params["height"]))
        pixels = patch(request.prompt, request.seed, width, height)
        drawn = (params["width"], params["height"]) if "upscale_to" in params else None
        previews: list[int | None] = [*range(request.partial_images), None]
        return [
            ImageChunk(request_id, pixels, request.seed, STEPS, STEPS, partial, drawn) for partial in previews
        ]

    def _record(self, seen: Seen) -> None:
        assert seen.outcome is not None
        speech = isinstance(seen.request, Speech)
        record = RequestRecord(
            request_id=seen.request_id or "",
            pipeline="tone-tts" if speech else "patch" if isinstance(seen.request, Image) else "echo",
            reason=seen.outcome,
            queue_seconds=0.01,
            first_chunk_seconds=0.05 if seen.chunks else None,
            total_seconds=0.2,
            media_seconds=seen.chunks * CHUNK / RATE if speech else 0.0,
            underrun_seconds=0.0,
            gapless=isinstance(seen.request, Speech) and seen.request.gapless,
        )
        for observer in self._observers:
            observer(record)

    def add_observer(self, observer: Callable[[RequestRecord], None]) -> None:
        self._observers.append(observer)

    def health(self) -> Health:
        state = "ready" if self.ready else "down"
        replica = ReplicaStatus(name="tone/0", state=state, pid=1, steps=3, batch_size=1.5, restarts=2)
        stage = StageStatus(
            pipeline="tone-tts",
            stage="tone",
            kind="tone",
            state=state,
            replicas_up=int(self.ready),
            replicas=(replica,),
            waiting=4,
            running=sum(not seen.ended.is_set() for seen in self.seen),
            transfer_bytes=99,
        )
        return Health(ready=self.ready, draining=False, stages=(stage,))


def _parts(text: str, chunks: int) -> list[str]:
    size = -(-len(text) // chunks) or 1
    return [text[at : at + size] for at in range(0, len(text), size)]


class Gate:
    """A `before_chunk` that lets `open` chunks of each request pass and holds the others until `release`."""

    def __init__(self, open: int = 0) -> None:
        self._open = open
        self._released = asyncio.Event()

    async def __call__(self, seen: Seen) -> None:
        if seen.chunks >= self._open:
            await self._released.wait()

    def release(self) -> None:
        self._released.set()


def failing(error: Exception, after: int = 0) -> BeforeChunk:
    """A `before_chunk` that raises `error` once `after` chunks of the request have passed."""

    async def fail(seen: Seen) -> None:
        if seen.chunks >= after:
            raise error

    return fail
