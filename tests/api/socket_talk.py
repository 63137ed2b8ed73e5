"""What tests of the speech WebSocket say and hear."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fake_omni import FakeOmni
from serving import DEADLINE, next_event, serve
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from omni_async.api.app import create_app
from omni_async.api.config import ApiConfig
from omni_async.speech import Speech


@asynccontextmanager
async def session(
    omni: FakeOmni, config: ApiConfig | None = None, **fields: Any
) -> AsyncGenerator[ClientConnection]:
    """A configured session of raw pcm, unless `fields` say otherwise."""
    async with (
        serve(create_app(omni, config)) as address,
        connect(f"ws://{address}/v1/audio/speech/stream", proxy=None) as socket,
    ):
        await say(socket, "session.config", **{"response_format": "pcm", **fields})
        created = await next_event(socket)
        assert created["type"] == "session.created", created
        yield socket


async def say(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def close_code(socket: ClientConnection) -> int:
    with suppress(ConnectionClosed):
        while True:
            await asyncio.wait_for(socket.recv(), DEADLINE)
    assert socket.close_code is not None
    return socket.close_code


def inputs(omni: FakeOmni) -> list[str]:
    return [seen.request.input for seen in omni.seen if isinstance(seen.request, Speech)]
