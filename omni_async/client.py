"""`AsyncOmni`, the embedding interface, and `Omni`, its blocking twin."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Generator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omni_async import deploy
from omni_async.chat import Chat
from omni_async.config import Deployment, PipelineConfig, ServerConfig
from omni_async.echo import Echo
from omni_async.engine import Engine, Observer
from omni_async.errors import EngineDead, InvalidRequest, NotFound, StageFailed
from omni_async.ids import new_id
from omni_async.image import Image
from omni_async.outputs import AudioChunk, ImageChunk, Progress, TextChunk, VideoChunk
from omni_async.sound import Sound
from omni_async.speech import Speech
from omni_async.status import Health
from omni_async.stream import Delivery, ResultStream

log = logging.getLogger(__name__)

Request = Speech | Image | Sound | Chat | Echo
Chunk = AudioChunk | ImageChunk | VideoChunk | TextChunk | Progress
KINDS: dict[type, str] = {Speech: "speech", Image: "image", Sound: "sound", Chat: "chat", Echo: "echo"}
ROUTES = {
    "speech": "/v1/audio/speech",
    "image": "/v1/images/generations",
    "sound": "AsyncOmni.generate(Sound(…))",
    "chat": "/v1/chat/completions",
    "echo": "/v1/echo",
}


class AsyncOmni:
    """Serves one deployment inside the running event loop.

    `AsyncOmni()` serves the built-in demo pipelines; `model` is a built-in name, a Hugging Face id or
    a local folder; `deploy_config` a deploy YAML. Use it as an async context manager, or call
    `start()` and `close()`.
    """

    def __init__(
        self,
        deployment: Deployment | None = None,
        *,
        model: str | None = None,
        deploy_config: str | Path | None = None,
        stage_overrides: Mapping[str, Mapping[str, Any]] | None = None,
        server: ServerConfig | None = None,
    ) -> None:
        self.deployment = deployment or deploy.load(
            model=model, deploy_config=deploy_config, stage_overrides=stage_overrides, server=server
        )
        self.started = False
        self._first_of_kind = {
            kind: pipeline for pipeline in reversed(self.pipelines) for kind in kinds_of(pipeline)
        }
        self._engine: Engine | None = None
        self._observers: list[Observer] = []

    @property
    def pipelines(self) -> tuple[PipelineConfig, ...]:
        """What is served."""
        return self.deployment.pipelines

    async def start(self) -> None:
        """Start the stages; returns when all are ready. Raises `ConfigError` or `EngineDead`."""
        engine = Engine(self.deployment)
        engine.observers = self._observers
        await engine.start()
        self._engine = engine
        self.started = True

    async def close(self, drain: float = 0.0) -> None:
        """Stop: new requests are refused, those in flight get `drain` seconds."""
        engine, self.started = self._engine, False
        if engine is not None:
            await engine.close(drain)
            self._engine = None

    async def drain(self, seconds: float | None = None) -> None:
        """Refuse new requests and wait until those in flight end, `drain_timeout` at most."""
        if self._engine is not None:
            await self._engine.drain(self.deployment.server.drain_timeout if seconds is None else seconds)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def add_observer(self, observer: Observer) -> None:
        """Call `observer` with the record of every request that ends."""
        self._observers.append(observer)

    def health(self) -> Health:
        """The state of every stage."""
        if self._engine is None:
            return Health(ready=False, draining=False, stages=())
        return self._engine.health()

    def pipeline_for(self, kind: str, model: str | None) -> PipelineConfig:
        """The pipeline that answers requests of `kind` under the name `model` (None: the first).

        Raises `NotFound` for an unknown model, `InvalidRequest` naming the route when the model is of
        another kind.
        """
        if model is None:
            if kind in self._first_of_kind:
                return self._first_of_kind[kind]
            raise NotFound(f"No model for {kind} is loaded.", param="model", code="model_not_found")
        for pipeline in self.pipelines:
            if model == pipeline.name or model in pipeline.aliases:
                return _of_kind(pipeline, kind, model)
        known = ", ".join(name for p in self.pipelines for name in (p.name, *p.aliases))
        raise NotFound(f"Unknown model {model!r}. Known: {known}.", param="model", code="model_not_found")

    async def generate(
        self, request: Request, *, request_id: str | None = None, timeout: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Run a request and yield what it makes, as it is made.

        Raises `InvalidRequest` before any stage is asked, `Overloaded` when the queue is full,
        `StageFailed`, `DeadlineExceeded` (after `timeout` seconds; the server's by default) or
        `EngineDead`. Leaving the loop cancels the request.
        """
        if self._engine is None:
            raise EngineDead("AsyncOmni is not started.")
        pipeline = self.pipeline_for(KINDS[type(request)], request.model)
        stream = self._engine.submit(
            pipeline.name,
            resolve(request, pipeline),
            request_id=request_id or new_id(),
            seed=None if isinstance(request, Echo) else request.seed,
            gapless=request.gapless if isinstance(request, Speech | Chat) else True,
            timeout=timeout,
            arrays=media_of(request),
            outputs=request.outputs(pipeline.chat) if isinstance(request, Chat) and pipeline.chat else (),
        )
        engine = self._engine
        try:
            async for delivery in stream:
                yield to_chunk(delivery, stream, pipeline)
        finally:
            engine.cancel(stream.key)


def kinds_of(pipeline: PipelineConfig) -> list[str]:
    """The kinds of request that the pipeline answers."""
    return [kind for kind in KINDS.values() if getattr(pipeline, kind)]


def _of_kind(pipeline: PipelineConfig, kind: str, model: str) -> PipelineConfig:
    kinds = kinds_of(pipeline)
    if kind in kinds:
        return pipeline
    routes = " or ".join(ROUTES[k] for k in kinds)
    raise InvalidRequest(f"Model {model!r} does not do {kind}; use {routes}.", param="model")


def resolve(request: Request, pipeline: PipelineConfig) -> dict[str, Any]:
    """The stages' parameters. Raises `InvalidRequest`."""
    if isinstance(request, Echo):
        return request.resolve()
    if isinstance(request, Chat):
        assert pipeline.chat is not None
        return request.resolve(pipeline.chat, [stage.name for stage in pipeline.stages])
    return request.resolve(getattr(pipeline, KINDS[type(request)]))


def media_of(request: Request) -> dict[str, Any]:
    """The arrays that go with the request: a conversation's media by name; a picture's images as `image0`,
    `image1`, … and its `mask`."""
    if isinstance(request, Chat):
        return dict(request.media)
    if not isinstance(request, Image):
        return {}
    arrays = {f"image{index}": pixels for index, pixels in enumerate(request.images)}
    return arrays if request.mask is None else {**arrays, "mask": request.mask}


def to_chunk(delivery: Delivery, stream: ResultStream, pipeline: PipelineConfig) -> Chunk:
    """What the caller sees of a delivery, by the name of what its stage put out."""
    arrays, meta, request_id = delivery.arrays, delivery.meta, stream.request_id
    try:
        if "pcm" in arrays:
            heard = pipeline.speech or pipeline.sound or pipeline.chat
            assert heard is not None, "a pipeline without a voice sent pcm"
            return AudioChunk(request_id, arrays["pcm"], meta.get("sample_rate", heard.sample_rate))
        if "pixels" in arrays:
            return _image(request_id, arrays["pixels"], meta)
        if "frames" in arrays:
            return VideoChunk(request_id, arrays["frames"], meta["fps"], meta["seed"])
        if "text" in meta:
            return TextChunk(request_id, meta["text"], meta)
        return Progress(request_id, meta["step"], meta["steps"])
    except KeyError as error:
        message = f"Stage {delivery.stage} sent a chunk without {error}."
        raise StageFailed(message, stage=delivery.stage) from None


def _image(request_id: str, pixels: Any, meta: Mapping[str, Any]) -> ImageChunk:
    drawn = meta.get("upscaled_from")
    return ImageChunk(
        request_id,
        pixels,
        seed=meta["seed"],
        step=meta["step"],
        steps=meta["steps"],
        partial=meta.get("partial"),
        upscaled_from=None if drawn is None else (drawn[0], drawn[1]),
    )


class Omni:
    """`AsyncOmni` for scripts: the same verbs, blocking. Its event loop runs in a thread of its own."""

    def __init__(
        self,
        deployment: Deployment | None = None,
        *,
        model: str | None = None,
        deploy_config: str | Path | None = None,
        stage_overrides: Mapping[str, Mapping[str, Any]] | None = None,
        server: ServerConfig | None = None,
    ) -> None:
        self._omni = AsyncOmni(
            deployment,
            model=model,
            deploy_config=deploy_config,
            stage_overrides=stage_overrides,
            server=server,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni", daemon=True)

    @property
    def pipelines(self) -> tuple[PipelineConfig, ...]:
        """What is served."""
        return self._omni.pipelines

    def start(self) -> None:
        """Start the stages; returns when all are ready. Raises `ConfigError` or `EngineDead`."""
        self._thread.start()
        try:
            self._call(self._omni.start())
        except BaseException:
            self._stop_loop()
            raise

    def close(self, drain: float = 0.0) -> None:
        """Stop everything."""
        if self._thread.is_alive():
            self._call(self._omni.close(drain))
            self._stop_loop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def health(self) -> Health:
        """The state of every stage."""
        return self._omni.health()

    def generate(self, request: Request, *, timeout: float | None = None) -> Generator[Chunk, None, None]:
        """Run a request and yield what it makes, as it is made; errors as `AsyncOmni.generate`."""
        chunks = self._omni.generate(request, timeout=timeout)
        try:
            while (chunk := self._call(anext(chunks, None))) is not None:
                yield chunk
        finally:
            self._call(chunks.aclose())

    def _call(self, awaitable: Any) -> Any:
        async def run() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
