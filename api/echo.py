"""`POST /v1/echo`: text sent back in chunks, to measure the stack without a model."""

from __future__ import annotations

from contextlib import aclosing

import msgspec
from starlette.types import Receive, Scope, Send

from omni_async.api.client import OmniClient
from omni_async.api.config import ApiConfig
from omni_async.api.exchange import (
    WhileConnected,
    end_stream,
    read_json,
    send_json,
    send_piece,
    start_stream,
)
from omni_async.echo import Echo
from omni_async.outputs import TextChunk


class EchoBody(Echo, kw_only=True, frozen=True):
    """The body of `POST /v1/echo`. With `stream`, each chunk is sent as it is made, as plain text."""

    stream: bool | None = None


class EchoAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole text."""

    text: str


_decoder = msgspec.json.Decoder(EchoBody)


class EchoEndpoint:
    """An ASGI endpoint."""

    def __init__(self, omni: OmniClient, config: ApiConfig) -> None:
        self._omni = omni
        self._limit = config.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = await read_json(scope, receive, self._limit, _decoder)
        self._omni.pipeline_for("echo", body.model)
        answer = self._stream if body.stream else self._whole
        await answer(Echo(text=body.text, chunks=body.chunks, model=body.model), scope, receive, send)

    async def _whole(self, echo: Echo, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[str] = []
        made = self._omni.generate(echo, request_id=scope["request_id"])
        async with WhileConnected(receive), aclosing(made) as chunks:
            async for chunk in chunks:
                parts.append(_text_of(chunk))
        await send_json(send, EchoAnswer(text="".join(parts)))

    async def _stream(self, echo: Echo, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        made = self._omni.generate(echo, request_id=scope["request_id"])
        async with WhileConnected(receive), aclosing(made) as chunks:
            async for chunk in chunks:
                if not started:
                    await start_stream(send, b"text/plain; charset=utf-8")
                    started = True
                await send_piece(send, _text_of(chunk).encode())
        if not started:
            await start_stream(send, b"text/plain; charset=utf-8")
        await end_stream(send)


def _text_of(chunk: object) -> str:
    assert isinstance(chunk, TextChunk)
    return chunk.text
