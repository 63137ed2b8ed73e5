"""What the API needs of the engine's client; `AsyncOmni` implements it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from omni_async.chat import Chat
from omni_async.config import PipelineConfig
from omni_async.echo import Echo
from omni_async.image import Image
from omni_async.outputs import AudioChunk, ImageChunk, Progress, TextChunk, VideoChunk
from omni_async.sound import Sound
from omni_async.speech import Speech
from omni_async.status import Health, RequestRecord

Request = Speech | Image | Sound | Chat | Echo
Chunk = AudioChunk | ImageChunk | VideoChunk | TextChunk | Progress


class OmniClient(Protocol):
    """Serves requests inside the running event loop."""

    started: bool

    @property
    def pipelines(self) -> tuple[PipelineConfig, ...]:
        """What is served; known before `start()`."""
        ...

    async def start(self) -> None:
        """Start the stages; returns when all are ready."""
        ...

    async def close(self) -> None:
        """Stop the stages."""
        ...

    def pipeline_for(self, kind: str, model: str | None) -> PipelineConfig:
        """The pipeline for requests of `kind`. Raises `NotFound` or `InvalidRequest`, param `model`."""
        ...

    def generate(self, request: Request, *, request_id: str | None = None) -> AsyncGenerator[Chunk, None]:
        """Run a request; closing the generator cancels it."""
        ...

    def health(self) -> Health:
        """The state of every stage."""
        ...

    def add_observer(self, observer: Callable[[RequestRecord], None]) -> None:
        """Call `observer` with the record of every request that ends."""
        ...
