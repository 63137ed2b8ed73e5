"""The scheduler: a plain object that takes an event and the time, and returns actions.

It admits, queues, picks replicas, forwards chunks, hands credits back, keeps the listeners'
clocks, and decides what a dead worker means for each request. No `await`, socket, clock or
process: the engine is the shell round it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from omni_async.config import ServerConfig
from omni_async.deadlines import Deadlines
from omni_async.errors import DeadlineExceeded, OmniError, Overloaded, StageFailed
from omni_async.events import (
    Action,
    Cancel,
    Deliver,
    End,
    Event,
    FromWorker,
    Send,
    Submit,
    Taken,
    Tick,
    WorkerDown,
    WorkerUp,
)
from omni_async.invariants import check_requests
from omni_async.messages import Abort, Consumed, Credit, Failed, Input, Output, WorkerMessage
from omni_async.messages import Submit as Open
from omni_async.plan import CLIENT, PipelinePlan
from omni_async.pool import StagePool
from omni_async.request import Phase, Request, StageRun
from omni_async.status import FinishReason
from omni_async.throughput import Throughput

BATCH_SLACK = 3600.0
"""Whole-file requests are due an hour after they came: after every listener, in order of arrival."""

MAX_RETRIES = 2


class Scheduler:
    """All scheduling state of one engine."""

    def __init__(self, plans: Mapping[str, PipelinePlan], config: ServerConfig) -> None:
        self.plans = dict(plans)
        self.config = config
        self.pools = {
            (name, stage.name): StagePool(name, stage, plan.max_inflight[stage.name])
            for name, plan in self.plans.items()
            for stage in plan.stages.values()
        }
        self.requests: dict[int, Request] = {}
        self.attempts: dict[int, Request] = {}
        self.late_messages = 0
        self.recent: deque[Event] = deque(maxlen=50)
        self._pool_of_replica = {r: pool for pool in self.pools.values() for r in pool.replicas}
        self._deadlines = Deadlines(self.requests)
        self._throughput = {name: Throughput() for name in self.plans}
        self._lost: dict[str, str] = {}
        self._wires = 0
        self._actions: list[Action] = []

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take `event` at time `now` (seconds, monotonic) and say what is to be done, in order."""
        self.recent.append(event)
        self._actions = []
        match event:
            case FromWorker():
                self._from_worker(event.replica, event.message, event.frames, now)
            case Submit():
                self._submit(event, now)
            case Taken():
                self._taken(event, now)
            case Cancel():
                if request := self.requests.get(event.key):
                    self._end(request, event.error, "failed" if event.error else "abort", now)
            case WorkerUp():
                self._worker_up(event.replica, now)
            case WorkerDown():
                self._worker_down(event, now)
            case Tick():
                self._expire(now)
        return self._actions

    @property
    def wake_at(self) -> float | None:
        """When the next `Tick` is wanted."""
        return self._deadlines.next

    def _submit(self, submit: Submit, now: float) -> None:
        request = Request(submit, self.plans[submit.pipeline].only(submit.outputs), now)
        error = self._refusal(request)
        if error is not None:
            self._actions.append(End(submit.key, error, request.record("refused", now)))
            return
        self.requests[submit.key] = request
        self._deadlines.add(submit.key, submit.deadline)
        self._open(request, now)

    def _refusal(self, request: Request) -> OmniError | None:
        if lost := self._lost.get(request.submit.pipeline):
            return StageFailed(f"Stage {lost} is down and will not come back.", stage=lost)
        entry = self.pools[request.submit.pipeline, request.plan.entry[0]]
        if len(entry.waiting) < self.config.max_queue or entry.has_room():
            return None
        seconds = self._throughput[request.submit.pipeline].seconds_for(len(entry.waiting) + 1)
        return Overloaded(
            f"The queue of {request.submit.pipeline} is full ({self.config.max_queue} requests). "
            f"Try again in {seconds:.0f} s.",
            retry_after=seconds,
        )

    def _open(self, request: Request, now: float) -> None:
        """Begin an attempt: a new wire number, and the entry stages."""
        self._wires += 1
        request.wire = self._wires
        request.runs = {}
        request.unfinished = set(request.plan.final)
        self.attempts[request.wire] = request
        for stage in request.plan.entry:
            request.runs[stage] = self._new_run(request, stage)
            self._wait(request, stage, now)

    def _wait(self, request: Request, stage: str, now: float) -> None:
        pool = self._pool(request, stage)
        pool.enqueue(request, self._due(request))
        self._pump(pool, now)

    def _pump(self, pool: StagePool, now: float) -> None:
        """Give free slots to those who wait, most urgent first."""
        while (started := pool.start_next()) is not None:
            request, replica = started
            stage = pool.stage.name
            run = request.runs[stage]
            run.phase, run.replica = Phase.RUNNING, replica
            if request.started_at is None:
                request.started_at = now
            submit = request.submit
            self._send(
                replica,
                Open(
                    request=request.wire,
                    params=submit.params,
                    seed=submit.seed,
                    window=request.plan.window[stage],
                    due_in=self._due(request) - now,
                    public_id=submit.request_id,
                    tensors=submit.tensors,
                ),
                submit.frames,
            )
            for message, frames in run.held:
                self._send(replica, message, frames)
            run.held = []

    def _from_worker(self, replica: str, message: WorkerMessage, frames: Sequence[Any], now: float) -> None:
        if not isinstance(message, Output | Consumed | Failed):
            raise TypeError(f"not a scheduling message: {message!r}")
        pool = self._pool_of_replica[replica]
        request = self.attempts.get(message.request)
        run = request.runs.get(pool.stage.name) if request else None
        if request is None or run is None or run.replica != replica:
            self.late_messages += 1
            return
        match message:
            case Output():
                self._output(request, run, message, frames, now)
            case Consumed():
                self._ack(request, message.source, pool.stage.name, message.upto, now)
            case Failed():
                self._end(request, OmniError.from_info(message.error), "failed", now)

    def _output(
        self, request: Request, run: StageRun, output: Output, frames: Sequence[Any], now: float
    ) -> None:
        window = request.plan.window[run.stage]
        out_of_order = run.phase is not Phase.RUNNING or output.seq != run.produced
        if out_of_order or run.produced - run.credited >= window:
            reason = (
                f"Stage {run.stage} sent chunk {output.seq} where {run.produced} of window {window} was due."
            )
            self._end(request, StageFailed(reason, stage=run.stage), "failed", now)
            return
        run.produced += 1
        run.leased = run.leased or any(ref.segment for ref in output.tensors.values())
        for target in request.plan.downstream[run.stage]:
            self._forward(request, run.stage, target, output, frames, now)
        if run.stage in request.plan.final:
            self._deliver(request, run.stage, output, frames, now)
        if output.final and request.wire in self.attempts:
            self._finish_run(request, run, now)

    def _forward(
        self, request: Request, source: str, target: str, output: Output, frames: Sequence[Any], now: float
    ) -> None:
        run = request.runs.get(target)
        if run is not None and run.phase is Phase.DONE:
            # It has made all of its output without this chunk.
            self._ack(request, source, target, output.seq + 1, now)
            return
        message = Input(
            request=request.wire,
            source=source,
            seq=output.seq,
            meta=output.meta,
            tensors=output.tensors,
            final=output.final,
            due_in=self._due(request) - now,
        )
        if run is not None and run.phase is Phase.RUNNING:
            self._send(run.replica, message, frames)
            return
        if run is None:
            run = request.runs[target] = self._new_run(request, target)
        run.held.append((message, frames))
        if self._may_start(request, target) and not self._pool(request, target).holds(request):
            self._wait(request, target, now)

    def _may_start(self, request: Request, target: str) -> bool:
        """A stage fed by a window of -1 starts when that source is done."""
        held = request.runs[target].held
        whole = request.plan.whole_sources[target]
        return all(any(m.source == source and m.final for m, _ in held) for source in whole)

    def _deliver(
        self, request: Request, stage: str, output: Output, frames: Sequence[Any], now: float
    ) -> None:
        if request.first_chunk_at is None:
            request.first_chunk_at = now
        request.delivered += 1
        if output.duration:
            request.clock.add(output.duration, now)
        self._actions.append(Deliver(request.submit.key, stage, output, frames))
        if output.final:
            request.unfinished.discard(stage)
            if not request.unfinished:
                self._end(request, None, "stop", now)

    def _finish_run(self, request: Request, run: StageRun, now: float) -> None:
        run.phase = Phase.DONE
        for source in request.plan.upstream[run.stage]:
            self._ack(request, source, run.stage, request.runs[source].produced, now)
        pool = self._pool(request, run.stage)
        pool.release(run.replica, request)
        self._pump(pool, now)

    def _taken(self, taken: Taken, now: float) -> None:
        if request := self.requests.get(taken.key):
            self._ack(request, taken.stage, CLIENT, taken.upto, now)

    def _ack(self, request: Request, source: str, consumer: str, upto: int, now: float) -> None:
        run = request.runs.get(source)
        if run is None or consumer not in run.acked:
            self.late_messages += 1
            return
        floor = run.ack(consumer, upto)
        if floor is None or (run.phase is Phase.DONE and not run.leased):
            return
        due_in = self._due(request) - now
        self._send(run.replica, Credit(request=request.wire, upto=floor, due_in=due_in))

    def _end(
        self, request: Request, error: OmniError | None, reason: FinishReason, now: float, dead: str = ""
    ) -> None:
        self._abandon(request, now, kept=reason == "stop", dead=dead)
        del self.requests[request.submit.key]
        if reason == "stop":
            self._throughput[request.submit.pipeline].add(now)
        self._actions.append(End(request.submit.key, error, request.record(reason, now)))

    def _abandon(self, request: Request, now: float, *, kept: bool = False, dead: str = "") -> None:
        """Take the attempt out of every stage. `kept`: it ended well, so that only a stage that
        still works or still lends memory need be told. `dead` is a replica that cannot be told."""
        del self.attempts[request.wire]
        freed: list[StagePool] = []
        for run in request.runs.values():
            pool = self._pool(request, run.stage)
            if run.phase is Phase.WAITING:
                pool.withdraw(request)
                continue
            if run.phase is Phase.RUNNING:
                pool.release(run.replica, request)
                freed.append(pool)
            finished = run.phase is Phase.DONE or (kept and run.stage in request.plan.final)
            if run.replica != dead and (run.lends or not finished):
                self._send(run.replica, Abort(request=request.wire))
        for pool in freed:
            self._pump(pool, now)

    def _expire(self, now: float) -> None:
        for key in self._deadlines.expired(now):
            request = self.requests[key]
            seconds = now - request.submitted_at
            error = DeadlineExceeded(f"The request's deadline passed after {seconds:.1f} s.")
            self._end(request, error, "deadline", now)

    def _worker_up(self, replica: str, now: float) -> None:
        pool = self._pool_of_replica[replica]
        pool.up(replica)
        self._pump(pool, now)

    def _worker_down(self, event: WorkerDown, now: float) -> None:
        pool = self._pool_of_replica[event.replica]
        pool.down(event.replica, permanent=event.permanent)
        stage = pool.stage.name
        lost = StageFailed(f"Stage {stage} was lost: {event.reason}", stage=stage)
        hit = [r for r in self.attempts.values() if self._rests_on(r, stage, event.replica)]
        for request in hit:
            if request.delivered == 0 and request.retries < MAX_RETRIES and not pool.lost:
                request.retries += 1
                self._abandon(request, now, dead=event.replica)
                self._open(request, now)
            else:
                self._end(request, lost, "failed", now, dead=event.replica)
        if pool.lost:
            self._lost[pool.pipeline] = stage
            for request in [r for r in self.requests.values() if r.submit.pipeline == pool.pipeline]:
                self._end(request, lost, "failed", now)

    def _rests_on(self, request: Request, stage: str, replica: str) -> bool:
        """Whether the attempt runs on `replica`, or still needs memory that lay with it."""
        run = request.runs.get(stage)
        return run is not None and run.replica == replica and (run.phase is Phase.RUNNING or run.lends)

    def _pool(self, request: Request, stage: str) -> StagePool:
        return self.pools[request.submit.pipeline, stage]

    def _new_run(self, request: Request, stage: str) -> StageRun:
        return StageRun(stage, request.plan.consumers[stage], request.plan.window[stage])

    def _due(self, request: Request) -> float:
        return request.due(self.config.target_first_audio, BATCH_SLACK)

    def _send(self, replica: str, message: Any, frames: Sequence[Any] = ()) -> None:
        self._actions.append(Send(replica, message, frames))

    def check(self) -> None:
        """Every invariant; raises AssertionError with the last events."""
        try:
            check_requests(self.requests, self.attempts, self.pools)
        except AssertionError as error:
            events = "\n".join(map(repr, self.recent))
            raise AssertionError(f"{error}\nlast events:\n{events}") from error
