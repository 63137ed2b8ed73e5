"""`omni-async serve`: the HTTP and WebSocket server."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn

from omni_async.api.app import create_app
from omni_async.api.config import ApiConfig
from omni_async.cli import deployment, flags
from omni_async.client import AsyncOmni
from omni_async.config import Deployment
from omni_async.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT_PORT = 8091
BACKLOG = 2048


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends at once."""
    parser = deployment.make_parser("serve", "Serve models over HTTP and WebSocket.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on, default 127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"default {DEFAULT_PORT}; 0: any free one")
    parser.add_argument("--uds", metavar="PATH", help="listen on a unix socket instead")
    flags.add_struct(parser, ApiConfig, "the HTTP and WebSocket edge")
    args, resolved = deployment.parse(parser, argv)
    api = flags.to_struct(args, ApiConfig)
    sock, where = _bind(args.host, args.port, args.uds)
    with sock:
        return _run(serve(resolved, api, sock, where))


def _run(coroutine: Any) -> int:
    if sys.platform == "win32":
        return asyncio.run(coroutine)
    import uvloop

    return uvloop.run(coroutine)


def _bind(host: str, port: int, uds: str | None) -> tuple[socket.socket, str]:
    """Bound before anything is loaded: a port in use must not cost a model's start-up."""
    family = socket.AF_UNIX if uds else socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if uds:
            sock.bind(uds)
            return sock, f"unix:{uds}"
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {uds or f'{host}:{port}'}: {error.strerror}.") from None
    return sock, f"http://{host}:{sock.getsockname()[1]}"


async def serve(resolved: Deployment, api: ApiConfig, sock: socket.socket, where: str) -> int:
    """Start the stages, then accept; drain, then stop."""
    omni = AsyncOmni(resolved)
    stop = _stop_event()
    starting = asyncio.ensure_future(omni.start())
    stopped_early = asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopped_early], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    await starting
    try:
        await _serve_until(stop, omni, api, sock, where)
    finally:
        stopped_early.cancel()
        await omni.close()
    return 0


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the first signal drains, and that is ours to do."""

    def install_signal_handlers(self) -> None:
        """None."""

    def capture_signals(self) -> Any:
        """None either."""
        from contextlib import nullcontext

        return nullcontext()


async def _serve_until(
    stop: asyncio.Event, omni: AsyncOmni, api: ApiConfig, sock: socket.socket, where: str
) -> None:
    config = uvicorn.Config(
        create_app(omni, api),
        log_config=None,
        access_log=False,
        ws="websockets-sansio",
        ws_max_size=api.ws_max_message_bytes,
        backlog=BACKLOG,
        lifespan="off",
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve([sock]))
    print(f"Ready on {where}\n{_example(omni, where)}", flush=True)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    stop.clear()
    again = asyncio.create_task(stop.wait())
    drain = asyncio.create_task(omni.drain())
    await asyncio.wait([drain, again], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    server.force_exit = again.done()
    for task in (stopping, again, drain):
        task.cancel()
    await asyncio.gather(stopping, again, drain, return_exceptions=True)
    await omni.close()
    await serving


def _example(omni: AsyncOmni, where: str) -> str:
    if where.startswith("unix") or not any(pipeline.speech for pipeline in omni.pipelines):
        return ""
    return (
        f"Try: curl {where}/v1/audio/speech -H 'Content-Type: application/json' "
        "-d '{\"input\": \"Hello!\"}' -o hello.wav"
    )
