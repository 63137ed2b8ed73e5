"""What every request passes: its id, its key, and the answer to whatever goes wrong behind it."""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_async import logs
from omni_async.api.config import ApiConfig
from omni_async.api.errors import ClientGone, Unauthorized, close_code, http_status
from omni_async.api.exchange import header, send_error
from omni_async.api.session_messages import ErrorEvent
from omni_async.ids import new_id

log = logging.getLogger(__name__)

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_OPEN_PATHS = ("/health", "/health/ready")


class Gateway:
    """ASGI middleware: request id, API key, and one shape for every error.

    `before` is awaited ahead of each request; it starts the engine when nothing else has, which happens
    where the app is mounted into another one that runs no lifespan for it.
    """

    def __init__(self, app: ASGIApp, config: ApiConfig, before: Callable[[], Awaitable[None]]) -> None:
        self._app = app
        self._before = before
        self._keys = [key.encode() for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP exchange, WebSocket session or lifespan."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        scope["request_id"] = request_id = label_of(scope)
        serve = self._http if scope["type"] == "http" else self._socket
        with logs.of_request(request_id):
            await serve(scope, receive, send, request_id)

    async def _http(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        answer = _Labelled(send, request_id)
        try:
            self._authorise(scope)
            if _path_of(scope).startswith("/v1/"):
                await self._before()
            await self._app(scope, receive, answer)
        except ClientGone:
            log.info("the client has gone")
        except Exception as error:
            self._log(error, request_id)
            if answer.started:
                raise
            await send_error(answer, error, request_id)

    async def _socket(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        try:
            self._authorise(scope)
            await self._before()
        except Exception as error:
            self._log(error, request_id)
            await refuse_socket(receive, send, error, request_id)
        else:
            await self._app(scope, receive, send)

    def _authorise(self, scope: Scope) -> None:
        if not self._keys or _path_of(scope) in _OPEN_PATHS:
            return
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        given = key.strip()
        known = [hmac.compare_digest(given, mine) for mine in self._keys]
        if scheme.lower() != b"bearer" or not any(known):
            raise Unauthorized("This server needs a known API key: Authorization: Bearer KEY.")

    @staticmethod
    def _log(error: Exception, request_id: str) -> None:
        if http_status(error) == 500:
            log.error("failed: %s", error, exc_info=error, extra={"request_id": request_id})


class _Labelled:
    """A `send` that adds the request id to the head of the answer and remembers that it has gone out."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (b"x-request-id", request_id.encode())
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = [*message.get("headers", ()), self._header]
        await self._send(message)


def _path_of(scope: Scope) -> str:
    """The path within this app, which may be mounted."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def label_of(scope: Scope) -> str:
    """The client's own `X-Request-Id` when it is sane, else a new one."""
    given = header(scope, b"x-request-id")
    if given is not None and _SANE_ID.fullmatch(given):
        return given.decode()
    return new_id()


async def refuse_socket(receive: Receive, send: Send, error: Exception, request_id: str) -> None:
    """Accept the WebSocket, say why it is closed, and close it: a refused handshake tells no reason."""
    await receive()
    await send({"type": "websocket.accept", "headers": [(b"x-request-id", request_id.encode())]})
    text = msgspec.json.encode(ErrorEvent.of(error)).decode()
    await send({"type": "websocket.send", "text": text})
    await send({"type": "websocket.close", "code": close_code(error), "reason": ""})
