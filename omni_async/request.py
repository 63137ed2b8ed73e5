"""The life of one request inside the scheduler: which stages it holds, what they made, who has used it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from omni_async.events import Submit
from omni_async.messages import Input
from omni_async.plan import PipelinePlan
from omni_async.playback import PlaybackClock
from omni_async.status import FinishReason, RequestRecord


class Phase(Enum):
    """Of a request at one stage."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


class StageRun:
    """One request at one stage.

    `acked` counts, per consumer, the output chunks it is done with. Credits go back in strides of a
    quarter of the window: fewer messages, and the producer never runs dry of them.
    """

    __slots__ = ("stage", "phase", "replica", "held", "produced", "credited", "acked", "leased", "stride")

    def __init__(self, stage: str, consumers: Sequence[str], window: int) -> None:
        self.stage = stage
        self.phase = Phase.WAITING
        self.replica = ""
        self.held: list[tuple[Input, Sequence[Any]]] = []
        self.produced = 0
        self.credited = 0
        self.acked = dict.fromkeys(consumers, 0)
        self.leased = False
        self.stride = max(1, min(window, 64) // 4)

    def ack(self, consumer: str, upto: int) -> int | None:
        """Note that `consumer` is done below `upto`; the new common floor if a credit is due."""
        self.acked[consumer] = max(self.acked[consumer], min(upto, self.produced))
        floor = min(self.acked.values())
        if floor - self.credited < self.stride:
            return None
        self.credited = floor
        return floor

    @property
    def lends(self) -> bool:
        """Whether its worker's memory is still needed by a consumer."""
        return self.leased and self.credited < self.produced


class Request:
    """A caller's request. `wire` is the number of the present attempt."""

    __slots__ = (
        "submit",
        "plan",
        "wire",
        "runs",
        "clock",
        "delivered",
        "unfinished",
        "submitted_at",
        "started_at",
        "first_chunk_at",
        "retries",
    )

    def __init__(self, submit: Submit, plan: PipelinePlan, now: float) -> None:
        self.submit = submit
        self.plan = plan
        self.wire = 0
        self.runs: dict[str, StageRun] = {}
        self.clock = PlaybackClock()
        self.delivered = 0
        self.unfinished = set(plan.final)
        self.submitted_at = now
        self.started_at: float | None = None
        self.first_chunk_at: float | None = None
        self.retries = 0

    def due(self, target_first_audio: float, batch_slack: float) -> float:
        """When its next output is due: by the listener's clock, the target to first audio, or late."""
        if not self.submit.gapless:
            return self.submitted_at + batch_slack
        due = self.clock.due
        return self.submitted_at + target_first_audio if due is None else due

    def record(self, reason: FinishReason, now: float) -> RequestRecord:
        """How it went, up to `now`."""
        first, started = self.first_chunk_at, self.started_at
        return RequestRecord(
            request_id=self.submit.request_id,
            pipeline=self.submit.pipeline,
            reason=reason,
            queue_seconds=(now if started is None else started) - self.submitted_at,
            first_chunk_seconds=None if first is None else first - self.submitted_at,
            total_seconds=now - self.submitted_at,
            media_seconds=self.clock.media,
            underrun_seconds=self.clock.underrun,
            gapless=self.submit.gapless,
            retries=self.retries,
        )
