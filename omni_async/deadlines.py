"""The deadlines of live requests, earliest first."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator, Sized
from typing import Protocol


class Live(Container[int], Sized, Protocol):
    """The keys that still matter."""


class Deadlines:
    """A heap over keys of `live`; keys that have gone from `live` are dropped on the way."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._heap: list[tuple[float, int]] = []

    @property
    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, key: int, at: float) -> None:
        """`key` ends at time `at`."""
        # A long deadline at the top would keep those of ended requests behind it for ever.
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (at, key))

    def expired(self, now: float) -> Iterator[int]:
        """Take out every live key whose time has come."""
        while (at := self.next) is not None and at <= now:
            yield heapq.heappop(self._heap)[1]
