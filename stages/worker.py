"""The loop of a stage worker: receive → batcher → `executor.step` → send.

One thread, no event loop. It knows nothing of models (the executor) nor of processes
(`process.py`); the engine's tests run it in a thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omni_async.config import StageConfig
from omni_async.errors import EngineDead, OmniError, StageFailed
from omni_async.messages import (
    Abort,
    Configure,
    Consumed,
    Credit,
    EngineMessage,
    Failed,
    Input,
    Output,
    Stop,
    Submit,
    WorkerMessage,
)
from omni_async.stages.batcher import Batcher, Row
from omni_async.stages.executor import Chunk, Executor, StageRequest, StepOutput
from omni_async.transports.channel import SyncChannel
from omni_async.transports.shm import Arena, ArenaReader, pack, unpack

log = logging.getLogger(__name__)

Clock = Callable[[], float]
IDLE_WAIT = 1.0


@dataclass(slots=True)
class Progress:
    """What the heartbeat thread reads while the loop works."""

    steps: int = 0
    running: int = 0
    step_began: float | None = None
    last_step: float = 0.0
    rows: int = 0


class Worker:
    """Serves one executor to one engine until told to stop."""

    def __init__(
        self,
        channel: SyncChannel[EngineMessage, WorkerMessage],
        config: StageConfig,
        executor: Executor,
        arena: Arena,
        reader: ArenaReader,
        *,
        inline_limit: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self.channel = channel
        self.config = config
        self.executor = executor
        self.arena = arena
        self.reader = reader
        self.inline_limit = inline_limit
        self.clock = clock
        self.batcher = Batcher(
            config.scheduling_policy,
            config.max_batch_size or config.max_num_seqs,
            config.max_num_batched_tokens,
        )
        self.progress = Progress(last_step=clock())
        self.stopping = False

    def run(self) -> None:
        """Serve until `Stop`."""
        while not self.stopping:
            self._receive()
            if not self.stopping:
                self._step()

    def _receive(self) -> None:
        """Take every message that has come; wait for one when there is nothing to step."""
        item = self.channel.recv(0.0 if self.batcher.has_ready() else IDLE_WAIT)
        while item is not None:
            self._handle(*item)
            if self.stopping:
                return
            item = self.channel.recv(0.0)

    def _handle(self, message: EngineMessage, frames: Sequence[memoryview]) -> None:
        match message:
            case Input():
                self._input(message, frames)
            case Credit():
                self._credit(message)
            case Submit():
                self._submit(message, frames)
            case Abort():
                self._abort(message.request)
            case Stop():
                self.stopping = True
            case Configure():
                raise TypeError("a worker is configured once")

    def _submit(self, message: Submit, frames: Sequence[memoryview]) -> None:
        own = message.params.get("sampling", {}).get(self.config.name, {})
        shared = {key: value for key, value in message.params.items() if key != "sampling"}
        request = StageRequest(
            request=message.request,
            params={**self.config.default_sampling_params, **shared, **own},
            own=frozenset(own),
            seed=message.seed,
            tensors=unpack(message.tensors, frames, self.reader),
            public_id=message.public_id,
        )
        try:
            state = self.executor.admit(request)
        except Exception as error:
            self._fail(message.request, error)
            return
        due = self.clock() + message.due_in
        self.batcher.add(message.request, state, due=due, window=message.window)
        self.progress.running = len(self.batcher.rows)

    def _input(self, message: Input, frames: Sequence[memoryview]) -> None:
        row = self.batcher.rows.get(message.request)
        if row is None:
            return
        try:
            tensors = unpack(message.tensors, frames, self.reader)
        except (ValueError, OSError) as error:
            self._drop(message.request)
            self._fail(message.request, error)
            return
        state = row.state
        state.inputs.append(Chunk(message.source, message.meta, tensors, message.final))
        row.sources.append(message.source)
        row.due = self.clock() + message.due_in
        if message.final:
            row.finals += 1
            state.input_done = row.finals == len(self.config.inputs)

    def _credit(self, message: Credit) -> None:
        self.arena.release(message.request, message.upto)
        row = self.batcher.rows.get(message.request)
        if row is not None:
            row.credited = message.upto
            row.due = self.clock() + message.due_in

    def _abort(self, request: int) -> None:
        self._drop(request)
        self.arena.drop(request)

    def _drop(self, request: int) -> None:
        """Take a request out of the running set, and let the executor let go of it."""
        row = self.batcher.remove(request)
        self.progress.running = len(self.batcher.rows)
        if row is None:
            return
        try:
            self.executor.abort(row.state)
        except Exception:
            # The caller is gone or has its own error; this one is the operator's to see.
            log.exception("abort of request %s failed", row.state.request.public_id)

    def _step(self) -> None:
        rows = self.batcher.pick(self.clock())
        if not rows:
            return
        units = sum(row.state.cost for row in rows)
        began = self.progress.step_began = self.clock()
        results = self._run(rows)
        now = self.clock()
        self.batcher.cost.learn(units, now - began)
        self.progress.step_began, self.progress.last_step = None, now
        self.progress.steps += 1
        self.progress.rows += len(rows)
        for row, outputs in zip(rows, results, strict=True):
            if isinstance(outputs, Exception):
                self._drop(row.state.request.request)
                self.arena.drop(row.state.request.request)
                self._fail(row.state.request.request, outputs)
            else:
                self._emit(row, outputs)

    def _run(self, rows: Sequence[Row]) -> Sequence[list[StepOutput] | Exception]:
        """One step; when it raises, each row alone, so that a bad row fails alone."""
        try:
            results = self.executor.step([row.state for row in rows])
            if len(results) != len(rows):
                raise StageFailed(f"The step returned {len(results)} results for {len(rows)} rows.")
            return results
        except EngineDead:
            # Not this step but the executor is broken: the process ends, and another takes its place.
            raise
        except Exception as error:
            if len(rows) == 1:
                return [error]
            log.warning("a step of %d rows failed (%r); running them one by one", len(rows), error)
            return [self._run([row])[0] for row in rows]

    def _emit(self, row: Row, outputs: Sequence[StepOutput]) -> None:
        request = row.state.request.request
        try:
            for output in outputs:
                self._send_output(row, request, output)
        except (TypeError, ValueError) as error:
            # The executor made something that cannot be sent: its request fails, the worker goes on.
            self._drop(request)
            self.arena.drop(request)
            self._fail(request, error)
            return
        if any(output.final for output in outputs):
            self.batcher.remove(request)
            self.progress.running = len(self.batcher.rows)
            return
        for source, upto in row.take_consumed():
            self.channel.send(Consumed(request=request, source=source, upto=upto))

    def _send_output(self, row: Row, request: int, output: StepOutput) -> None:
        tensors, frames = pack(
            output.tensors, arena=self.arena, request=request, seq=row.sent, inline_limit=self.inline_limit
        )
        message = Output(
            request=request,
            seq=row.sent,
            meta=dict(output.meta),
            tensors=tensors,
            duration=output.duration,
            final=output.final,
        )
        self.channel.send(message, frames)
        row.sent += 1
        row.due += output.duration

    def _fail(self, request: int, error: Exception) -> None:
        name = self.config.name
        if isinstance(error, OmniError):
            error.stage = error.stage or name
        else:
            log.error("request %d failed in stage %s", request, name, exc_info=error)
            error = StageFailed(f"Stage {name} failed: {type(error).__name__}: {error}", stage=name)
        self.channel.send(Failed(request=request, error=error.info()))
