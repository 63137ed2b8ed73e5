"""Real servers on free ports of 127.0.0.1, and what clients of them need."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import av
import httpx
import numpy as np
import uvicorn
from numpy.typing import NDArray
from starlette.types import ASGIApp
from websockets.asyncio.client import ClientConnection

DEADLINE = 20.0


class Server(uvicorn.Server):
    """uvicorn without signal handlers, as tests run beside it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def serve(app: ASGIApp) -> AsyncGenerator[str, None]:
    """Serve `app` in this loop; gives `127.0.0.1:port`. Fails if a task of the server outlives it."""
    before = asyncio.all_tasks()
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5, lifespan="on"))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await until(lambda: server.started or running.done())
        if running.done():
            running.result()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, DEADLINE)
        listener.close()
    await until(lambda: not [task for task in asyncio.all_tasks() - before if not task.done()])


@contextlib.asynccontextmanager
async def client_of(app: ASGIApp, **options: Any) -> AsyncGenerator[httpx.AsyncClient]:
    """An HTTP client of `app` on a server of its own."""
    async with (
        serve(app) as address,
        httpx.AsyncClient(
            base_url=f"http://{address}", timeout=DEADLINE, trust_env=False, **options
        ) as client,
    ):
        yield client


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true, at most `DEADLINE` seconds."""
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.002)


def decode(data: bytes) -> tuple[NDArray[np.float32], int]:
    """The audio file `data` as float32 samples `[samples]`, and its sample rate."""
    with av.open(io.BytesIO(data), "r") as container:
        parts = [_mono(frame) for frame in container.decode(audio=0)]
        return np.concatenate(parts), container.streams.audio[0].rate


def _mono(frame: av.AudioFrame) -> NDArray[np.float32]:
    samples: NDArray[Any] = frame.to_ndarray().reshape(-1)
    scale = {"f4": 1.0, "f8": 1.0, "i2": 2.0**15 - 1, "i4": 2.0**31 - 1}[samples.dtype.str[1:]]
    return samples.astype(np.float32) / np.float32(scale)


async def next_event(socket: ClientConnection) -> dict[str, Any]:
    """The next text frame; binary frames before it are passed over."""
    while True:
        message = await asyncio.wait_for(socket.recv(), DEADLINE)
        if isinstance(message, str):
            return json.loads(message)


async def until_event(socket: ClientConnection, kind: str) -> tuple[list[dict[str, Any]], bytes]:
    """All events up to and with the first of `kind`, and the binary frames between them, joined."""
    events: list[dict[str, Any]] = []
    audio = bytearray()
    while not events or events[-1]["type"] != kind:
        message = await asyncio.wait_for(socket.recv(), DEADLINE)
        if isinstance(message, str):
            events.append(json.loads(message))
        else:
            audio += message
    return events, bytes(audio)
