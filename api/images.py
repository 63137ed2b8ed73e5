"""`POST /v1/images/generations` and `POST /v1/images/edits`: pictures, as JSON or as server-sent events."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from starlette.types import Receive, Scope, Send

from omni_async.api.errors import ErrorDetail, error_detail
from omni_async.api.exchange import (
    WhileConnected,
    end_stream,
    read_json,
    send_json,
    send_piece,
    start_stream,
)
from omni_async.api.image_fields import ImageFields
from omni_async.api.image_form import read_edit
from omni_async.api.image_job import Drawn, ImageJob, ImageService, ImageUsage
from omni_async.api.media_source import MediaSource
from omni_async.errors import OmniError

_decoder = msgspec.json.Decoder(ImageFields)
_encoder = msgspec.json.Encoder()
Event = Literal["image_generation", "image_edit"]


class ImageData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One picture. `upscaled_from` is the size that the model drew where the picture was enlarged."""

    b64_json: str
    seed: int
    upscaled_from: str | None = None


class ImageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All pictures, in the order of their seeds."""

    created: int
    data: list[ImageData]
    output_format: str
    size: str
    background: str
    usage: ImageUsage


class ImageEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A preview (`….partial_image`, with its `partial_image_index`) or a finished picture (`….completed`,
    with `usage`); `index` says which of the n pictures."""

    type: str
    index: int
    b64_json: str
    seed: int
    created_at: int
    size: str
    output_format: str
    background: str
    quality: str
    partial_image_index: int | None = None
    upscaled_from: str | None = None
    usage: ImageUsage | None = None


class ImageErrorEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The request failed after its first event; nothing follows."""

    error: ErrorDetail


class GenerationsEndpoint:
    """An ASGI endpoint."""

    def __init__(self, service: ImageService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        fields = await read_json(scope, receive, self._service.config.max_body_bytes, _decoder)
        job = self._service.prepare(fields)
        await _answer(self._service, job, "image_generation", fields, scope, receive, send)


class EditsEndpoint:
    """An ASGI endpoint: multipart, with the images that are changed."""

    def __init__(self, service: ImageService) -> None:
        self._service = service
        self._source = MediaSource(service.config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        fields, upload = await read_edit(scope, receive, self._service, self._source)
        job = self._service.prepare(fields, upload)
        await _answer(self._service, job, "image_edit", fields, scope, receive, send)


async def _answer(
    service: ImageService,
    job: ImageJob,
    event: Event,
    fields: ImageFields,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    request_id = scope["request_id"]
    if fields.stream:
        await _answer_events(service, job, event, request_id, receive, send)
        return
    async with WhileConnected(receive), aclosing(service.drawn(job, request_id)) as pictures:
        drawn = sorted([each async for each in pictures], key=lambda each: each.index)
    answer = ImageAnswer(
        created=int(time.time()),
        data=[
            ImageData(b64_json=each.b64_json, seed=each.chunk.seed, upscaled_from=_drawn_size(each))
            for each in drawn
        ],
        output_format=job.output_format,
        size=drawn[0].size,
        background=job.background(drawn[0]),
        usage=job.usage(drawn),
    )
    await send_json(send, answer)


async def _answer_events(
    service: ImageService, job: ImageJob, event: Event, request_id: str, receive: Receive, send: Send
) -> None:
    async with WhileConnected(receive), aclosing(service.drawn(job, request_id)) as pictures:
        first = await anext(pictures)
        headers = [(b"cache-control", b"no-cache")]
        await start_stream(send, b"text/event-stream; charset=utf-8", headers)
        await send_piece(send, _event(job, event, first))
        try:
            async for each in pictures:
                await send_piece(send, _event(job, event, each))
        except OmniError as error:
            await send_piece(send, _sse("error", ImageErrorEvent(error=error_detail(error, request_id))))
    await end_stream(send)


def _event(job: ImageJob, event: Event, drawn: Drawn) -> bytes:
    partial = drawn.chunk.partial
    name = f"{event}.{'completed' if partial is None else 'partial_image'}"
    content = ImageEvent(
        type=name,
        index=drawn.index,
        b64_json=drawn.b64_json,
        seed=drawn.chunk.seed,
        created_at=int(time.time()),
        size=drawn.size,
        output_format=job.output_format,
        background=job.background(drawn),
        quality="auto",
        partial_image_index=partial,
        upscaled_from=_drawn_size(drawn),
        usage=job.usage([drawn]) if partial is None else None,
    )
    return _sse(name, content)


def _drawn_size(drawn: Drawn) -> str | None:
    size = drawn.chunk.upscaled_from
    return None if size is None else f"{size[0]}x{size[1]}"


def _sse(name: str, content: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(content) + b"\n\n"
