"""The caller's end of one request: an async iterator of what its final stages make."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from omni_async.errors import OmniError


class Delivery(msgspec.Struct, frozen=True):
    """One chunk of the answer: arrays (numpy, owned) and metadata of `stage`'s output."""

    stage: str
    meta: Mapping[str, Any]
    arrays: Mapping[str, Any]
    duration: float


class ResultStream:
    """Chunks in order; ends, or raises the request's error after what was delivered before it.

    `on_taken(key, stage, count)` is called as the caller takes chunks, which is what lets the stage
    go on: at most a window of chunks waits here.
    """

    def __init__(self, key: int, request_id: str, on_taken: Callable[[int, str, int], None]) -> None:
        self.key = key
        self.request_id = request_id
        self.ended = False
        self.error: OmniError | None = None
        self._on_taken = on_taken
        self._items: deque[Delivery] = deque()
        self._taken: dict[str, int] = {}
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delivery: Delivery) -> None:
        """Add a chunk."""
        self._items.append(delivery)
        self._wake()

    def end(self, error: OmniError | None) -> None:
        """No more chunks will come. The first error counts."""
        self.ended, self.error = True, self.error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> ResultStream:
        return self

    async def __anext__(self) -> Delivery:
        while not self._items:
            if self.error is not None:
                raise self.error
            if self.ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        delivery = self._items.popleft()
        if not self.ended:
            count = self._taken[delivery.stage] = self._taken.get(delivery.stage, 0) + 1
            self._on_taken(self.key, delivery.stage, count)
        return delivery
