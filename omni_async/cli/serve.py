"""`omni-async serve`: the HTTP and WebSocket server.

running → draining (first SIGTERM or SIGINT: new requests are refused, those in flight end) → stopping
(second signal, or `drain_timeout`).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import uvicorn

from omni_async.api.app import create_app
from omni_async.api.config import ApiConfig
from omni_async.cli import deployment, flags
from omni_async.cli.listener import Listener, listen
from omni_async.client import AsyncOmni
from omni_async.config import Deployment

DEFAULT_PORT = 8091
CLOSE_SECONDS = 5
"""What connections get to take their last bytes after the engine has ended every request."""


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = deployment.make_parser("serve", "Serve models over HTTP and WebSocket.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"0: any free one (default {DEFAULT_PORT})"
    )
    parser.add_argument("--uds", metavar="PATH", help="listen on a unix socket instead of host and port")
    flags.add_struct(parser, ApiConfig, "the HTTP and WebSocket edge")
    args, resolved = deployment.parse(parser, argv)
    api = flags.to_struct(args, ApiConfig)
    with listen(args.host, args.port, args.uds) as listener:
        _run(serve(resolved, api, listener, debug=args.log_level == "debug"))
    return 0


def _run(work: Coroutine[Any, Any, None]) -> None:
    if sys.platform == "win32":
        asyncio.run(work)
    else:
        import uvloop

        uvloop.run(work)


async def serve(resolved: Deployment, api: ApiConfig, listener: Listener, *, debug: bool) -> None:
    """Start the stages, accept, drain, stop."""
    signals = Signals()
    omni = AsyncOmni(resolved)
    if not await _unless(signals.first, omni.start()):
        return
    try:
        await _serve_until_stopped(signals, omni, _config(omni, api, debug), listener)
    finally:
        await omni.close()


def _config(omni: AsyncOmni, api: ApiConfig, debug: bool) -> uvicorn.Config:
    logging.getLogger("uvicorn").setLevel(logging.INFO if debug else logging.WARNING)
    return uvicorn.Config(
        create_app(omni, api),
        log_config=None,
        access_log=debug,
        server_header=False,
        proxy_headers=False,
        ws="websockets-sansio",
        ws_max_size=api.ws_max_message_bytes,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        lifespan="on",
    )


async def _serve_until_stopped(
    signals: Signals, omni: AsyncOmni, config: uvicorn.Config, listener: Listener
) -> None:
    server = _Server(config, lambda: print(_greeting(omni, listener), flush=True))
    serving = asyncio.create_task(server.serve([listener.sock]))
    await _unless(signals.first, asyncio.shield(serving))
    await _unless(signals.second, omni.drain())
    await omni.close()
    server.should_exit = True
    if not await _unless(signals.second, asyncio.shield(serving)):
        server.force_exit = True
        await serving


class Signals:
    """SIGTERM and SIGINT of the running loop's process, counted."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> bool:
    """Do `work`, but cancel it when `stop` is set. Whether it ended by itself; raises what it raises."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
            return True
        return False
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


class _Server(uvicorn.Server):
    """uvicorn that says when it accepts, and leaves the signals to us."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def capture_signals(self) -> AbstractContextManager[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return nullcontext()


def _greeting(omni: AsyncOmni, listener: Listener) -> str:
    names = ", ".join(pipeline.name for pipeline in omni.pipelines)
    path, body, output = "v1/echo", '{"text": "Hello!"}', ""
    if any(pipeline.chat for pipeline in omni.pipelines):
        path = "v1/chat/completions"
        body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    if any(pipeline.image for pipeline in omni.pipelines):
        path, body = "v1/images/generations", '{"prompt": "red apple"}'
    if any(pipeline.speech for pipeline in omni.pipelines):
        path, body, output = "v1/audio/speech", '{"input": "Hello!"}', " -o hello.wav"
    command = f"{listener.curl}{listener.url}/{path} -H 'Content-Type: application/json' -d '{body}'{output}"
    return f"Serving {names} on {listener.url} - try: {command}"
