"""Who starts the engine, and who closes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.applications import Starlette

from omni_async.api.client import OmniClient
from omni_async.api.media_pool import MediaPool


class AppLife:
    """The app's lifespan, and the start by the first request where no lifespan runs."""

    def __init__(self, omni: OmniClient, media: MediaPool) -> None:
        self.media = media
        self._omni = omni
        self._lock = asyncio.Lock()
        self._seen_started = False

    @asynccontextmanager
    async def run(self, app: Starlette) -> AsyncGenerator[None, None]:
        """Start the engine unless it runs, and close it again if it was started here."""
        mine = not self._omni.started
        await self.ensure_started()
        try:
            yield
        finally:
            if mine:
                await self._omni.close()
            self.media.close()

    async def ensure_started(self) -> None:
        """Start the engine once. One that was started and then closed by its owner stays closed."""
        if self._seen_started:
            return
        async with self._lock:
            if not self._seen_started and not self._omni.started:
                await self._omni.start()
            self._seen_started = True
