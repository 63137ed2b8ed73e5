"""Which requests take the next step: a pure object over the rows of one worker."""

from __future__ import annotations

from collections import deque

from omni_async.config import SchedulingPolicy
from omni_async.stages.executor import State

LATE_BUDGET = 0.05
"""Seconds a batch may take when its most urgent row is late already: long enough to batch small rows,
short enough that those behind it do not become late too."""


class Row:
    """One request in a worker: its state, its due time and its accounts with both neighbours."""

    __slots__ = (
        "state",
        "due",
        "order",
        "served",
        "window",
        "sent",
        "credited",
        "sources",
        "consumed",
        "finals",
    )

    def __init__(self, state: State, *, due: float, window: int, order: int) -> None:
        self.state = state
        self.due = due
        self.order = order
        self.served = 0
        self.window = window
        self.sent = 0
        self.credited = 0
        self.sources: deque[str] = deque()
        self.consumed: dict[str, int] = {}
        self.finals = 0

    @property
    def ready(self) -> bool:
        """It has something to work on and room for what comes out."""
        return self.sent - self.credited < self.window and self.state.ready

    def take_consumed(self) -> list[tuple[str, int]]:
        """Per source, how many input chunks are used up in all, for those that changed."""
        changed: dict[str, int] = {}
        while len(self.sources) > len(self.state.inputs):
            source = self.sources.popleft()
            changed[source] = self.consumed[source] = self.consumed.get(source, 0) + 1
        return list(changed.items())


class StepCost:
    """Seconds per unit of work, learned from the steps that were run."""

    def __init__(self) -> None:
        self.seconds_per_unit = 0.0

    def learn(self, units: int, seconds: float) -> None:
        """A step of `units` took `seconds`."""
        sample = seconds / max(1, units)
        old = self.seconds_per_unit
        self.seconds_per_unit = sample if old == 0.0 else old + 0.2 * (sample - old)


class Batcher:
    """Picks rows by policy, up to `max_batch_size` rows and `max_tokens` units of work (0: no limit).

    `due`: earliest due time first, and only as many rows as let the most urgent one be on time.
    `fcfs`: in order of arrival. `round_robin`: whoever was served longest ago, and among those the earliest
    due. The first row's `batch_key` says which others can go with it.
    """

    def __init__(self, policy: SchedulingPolicy, max_batch_size: int, max_tokens: int = 0) -> None:
        self.policy: SchedulingPolicy = policy
        self.max_batch_size = max_batch_size
        self.max_tokens = max_tokens
        self.rows: dict[int, Row] = {}
        self.cost = StepCost()
        self._orders = 0
        self._steps = 0

    def add(self, request: int, state: State, *, due: float, window: int) -> Row:
        """Take a request into the running set."""
        self._orders += 1
        row = self.rows[request] = Row(state, due=due, window=window, order=self._orders)
        return row

    def remove(self, request: int) -> Row | None:
        """Forget a request."""
        return self.rows.pop(request, None)

    def has_ready(self) -> bool:
        """Whether a step would make progress."""
        return any(row.ready for row in self.rows.values())

    def pick(self, now: float) -> list[Row]:
        """The rows of the next step; empty when none is ready."""
        ready = [row for row in self.rows.values() if row.ready]
        if not ready:
            return []
        if self.policy == "due":
            ready.sort(key=lambda row: (row.due, row.order))
        elif self.policy == "round_robin":
            ready.sort(key=lambda row: (row.served, row.due, row.order))
        key = ready[0].state.batch_key
        batch = self._fill([row for row in ready if row.state.batch_key == key], now)
        self._steps += 1
        for row in batch:
            row.served = self._steps
        return batch

    def _fill(self, ready: list[Row], now: float) -> list[Row]:
        seconds = max(ready[0].due - now, LATE_BUDGET) if self.policy == "due" else float("inf")
        each = self.cost.seconds_per_unit
        batch: list[Row] = []
        units = 0
        for row in ready[: self.max_batch_size]:
            cost = row.state.cost
            too_much = self.max_tokens and units + cost > self.max_tokens
            if batch and (too_much or (units + cost) * each > seconds):
                break
            batch.append(row)
            units += cost
        return batch
