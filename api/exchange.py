"""One HTTP exchange, written straight on ASGI: reading a body, sending an answer, noticing a disconnect.

Starlette's Request, Response and StreamingResponse do the same; what they add costs more than the
rest of a small request together.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from omni_async.api.errors import (
    ClientGone,
    ErrorBody,
    TooLarge,
    WrongContentType,
    error_detail,
    error_headers,
    http_status,
    invalid_json,
)

T = TypeVar("T")
Headers = list[tuple[bytes, bytes]]
_encoder = msgspec.json.Encoder()

WATCH_AFTER = 0.02
"""Seconds."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first value of the header `name` (lower case)."""
    for key, value in scope["headers"]:
        if key == name:
            return value
    return None


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises `TooLarge` as soon as it is known to pass `limit` bytes, `ClientGone`."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"The body has {int(declared)} bytes; at most {limit} are taken.")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise TooLarge(f"The body is larger than {limit} bytes.")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def read_json(scope: Scope, receive: Receive, limit: int, decoder: msgspec.json.Decoder[T]) -> T:
    """The JSON body as what `decoder` makes of it. Raises `WrongContentType`, `InvalidRequest`."""
    given = header(scope, b"content-type") or b""
    if given.partition(b";")[0].strip().lower() != b"application/json":
        raise WrongContentType("The body must be sent with Content-Type: application/json.")
    return decode_json(await read_body(scope, receive, limit), decoder)


def decode_json(data: bytes | str | msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T:
    """`data` decoded. Raises `InvalidRequest` with `param` naming the field at fault."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise invalid_json(error) from None


async def send_body(
    send: Send, body: bytes, media_type: bytes, status: int = 200, headers: Headers | None = None
) -> None:
    """Send a whole answer."""
    fields = [(b"content-type", media_type), (b"content-length", b"%d" % len(body)), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, value: Any, status: int = 200, headers: Headers | None = None) -> None:
    """Send `value` as JSON."""
    await send_body(send, _encoder.encode(value), b"application/json", status, headers)


async def send_error(send: Send, error: Exception, request_id: str) -> None:
    """Answer with `error`."""
    body = ErrorBody(error=error_detail(error, request_id))
    await send_json(send, body, http_status(error), error_headers(error))


async def start_stream(send: Send, media_type: bytes, headers: Headers | None = None) -> None:
    """Begin an answer whose body follows in pieces."""
    fields = [(b"content-type", media_type), *(headers or [])]
    await send({"type": "http.response.start", "status": 200, "headers": fields})


async def send_piece(send: Send, data: bytes) -> None:
    """Send a piece of the body; waits while the client's connection is full."""
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def end_stream(send: Send) -> None:
    """End the body."""
    await send({"type": "http.response.body", "body": b""})


class WhileConnected:
    """Runs the block while the client is there; its disconnect cancels the block and raises `ClientGone`.

    It looks from `WATCH_AFTER` on: an answer that is sooner ready saves the watching task. Must be left
    before the answer's last piece is sent: servers report a disconnect after that.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER, self._start)
        return self

    def _start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone and self._task.uncancel() == 0:
            raise ClientGone
