"""The replicas of one stage: who waits for a slot, and who holds which."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from omni_async.config import StageConfig

if TYPE_CHECKING:
    from omni_async.request import Request


def replica_names(pipeline: str, stage: StageConfig) -> tuple[str, ...]:
    """The names of a stage's workers: `pipeline.stage.0`, `pipeline.stage.1`, …"""
    return tuple(f"{pipeline}.{stage.name}.{index}" for index in range(stage.num_replicas))


class StagePool:
    """Slots and waiting requests of one stage.

    A replica has `max_num_seqs` slots; the stage as a whole takes `max_inflight` requests where an
    edge says so (0: no such limit).
    """

    def __init__(self, pipeline: str, stage: StageConfig, max_inflight: int) -> None:
        self.pipeline = pipeline
        self.stage = stage
        self.max_inflight = max_inflight
        self.replicas: dict[str, dict[int, Request]] = {name: {} for name in replica_names(pipeline, stage)}
        self.available: set[str] = set()
        self.gone: set[str] = set()
        self.waiting: dict[int, Request] = {}
        self._queue: list[tuple[float, int, int]] = []
        self._order = 0

    @property
    def lost(self) -> bool:
        """No replica is left, nor will one come back."""
        return len(self.gone) == len(self.replicas)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return sum(map(len, self.replicas.values()))

    def has_room(self) -> bool:
        """Whether a request would start at once."""
        return not self.waiting and self._free_replica() is not None

    def enqueue(self, request: Request, due: float) -> None:
        """Wait for a slot; earlier `due` goes first, then earlier arrival."""
        self._order += 1
        self.waiting[request.wire] = request
        heapq.heappush(self._queue, (due, self._order, request.wire))

    def holds(self, request: Request) -> bool:
        """Whether the request waits here."""
        return request.wire in self.waiting

    def withdraw(self, request: Request) -> None:
        """Wait no longer."""
        self.waiting.pop(request.wire, None)
        if len(self._queue) > 2 * len(self.waiting) + 64:
            self._queue = [entry for entry in self._queue if entry[2] in self.waiting]
            heapq.heapify(self._queue)

    def start_next(self) -> tuple[Request, str] | None:
        """Give the most urgent waiting request a slot on the least loaded replica."""
        if not self.waiting:
            return None
        replica = self._free_replica()
        if replica is None:
            return None
        while True:
            _, _, wire = heapq.heappop(self._queue)
            request = self.waiting.pop(wire, None)
            if request is not None:
                self.replicas[replica][wire] = request
                return request, replica

    def release(self, replica: str, request: Request) -> None:
        """Give the slot back."""
        self.replicas[replica].pop(request.wire, None)

    def runs(self, request: Request, replica: str) -> bool:
        """Whether the request holds a slot of `replica`."""
        return request.wire in self.replicas.get(replica, ())

    def up(self, replica: str) -> None:
        """`replica` takes work."""
        self.available.add(replica)
        self.gone.discard(replica)

    def down(self, replica: str, *, permanent: bool) -> None:
        """`replica` takes none; its slots are given back one by one by whoever holds them."""
        self.available.discard(replica)
        if permanent:
            self.gone.add(replica)

    def _free_replica(self) -> str | None:
        if self.max_inflight and self.running >= self.max_inflight:
            return None
        best, load = None, self.stage.max_num_seqs
        for name, held in self.replicas.items():
            if len(held) < load and name in self.available:
                best, load = name, len(held)
        return best

    def check(self) -> None:
        """Invariants: no slot too many, nobody both waits and runs, the queue covers who waits."""
        running = [wire for held in self.replicas.values() for wire in held]
        assert len(running) == len(set(running)), "a request holds two slots of one stage"
        assert all(len(held) <= self.stage.max_num_seqs for held in self.replicas.values())
        assert not self.max_inflight or len(running) <= self.max_inflight
        assert not set(running) & set(self.waiting), "a request both waits and runs"
        assert set(self.waiting) <= {wire for _, _, wire in self._queue}
        assert not self.available & self.gone
