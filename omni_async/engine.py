"""The engine: the IO shell round the scheduler. It turns messages, callers and time into events,
and actions into sends and deliveries. It holds no policy.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omni_async.config import Deployment
from omni_async.errors import EngineDead, Overloaded, StageFailed
from omni_async.events import (
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
from omni_async.launcher import Launcher, ProcessLauncher, ThreadLauncher
from omni_async.messages import Heartbeat, Output, WorkerMessage
from omni_async.plan import PipelinePlan
from omni_async.scheduler import Scheduler
from omni_async.status import Health, RequestRecord, StageStatus
from omni_async.stream import Delivery, ResultStream
from omni_async.supervisor import Supervisor
from omni_async.transports.run_dir import RunDir
from omni_async.transports.shm import ArenaReader, nbytes, pack, unpack

log = logging.getLogger(__name__)

Observer = Callable[[RequestRecord], None]
MakeLauncher = Callable[[Path, Callable[[Heartbeat], None]], Launcher]


class Engine:
    """Runs the stages of one deployment. All methods belong to one event loop."""

    def __init__(self, deployment: Deployment, make_launcher: MakeLauncher | None = None) -> None:
        self.deployment = deployment
        self.config = deployment.server
        self.draining = False
        self.observers: list[Observer] = []
        plans = {pipeline.name: PipelinePlan(pipeline) for pipeline in deployment.pipelines}
        self.scheduler = Scheduler(plans, self.config)
        self._make_launcher = make_launcher or self._default_launcher
        self._streams: dict[int, ResultStream] = {}
        self._keys = itertools.count(1)
        self._random = random.Random()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._supervisor: Supervisor | None = None
        self._run_dir: RunDir | None = None
        self._reader: ArenaReader | None = None
        self._bytes: dict[str, int] = {}
        self._idle = asyncio.Event()

    def _default_launcher(self, run_dir: Path, on_heartbeat: Callable[[Heartbeat], None]) -> Launcher:
        if self.config.single_process:
            return ThreadLauncher(run_dir)
        return ProcessLauncher(run_dir, on_heartbeat)

    async def start(self) -> None:
        """Start the stages and wait until all are ready. Raises `ConfigError` or `EngineDead`."""
        RunDir.reap_stale()
        self._run_dir = RunDir.create()
        self._reader = ArenaReader(self._run_dir.path)
        self._supervisor = Supervisor(
            self.deployment.pipelines,
            self.config,
            self._make_launcher(self._run_dir.path, self._on_heartbeat),
            on_message=self._on_message,
            on_up=lambda replica: self._handle(WorkerUp(replica)),
            on_down=lambda replica, reason, permanent: self._handle(WorkerDown(replica, reason, permanent)),
        )
        try:
            await self._supervisor.start()
        except BaseException:
            await self._stop()
            raise

    async def drain(self, seconds: float) -> None:
        """Refuse new requests and wait until those in flight end, `seconds` at most."""
        self.draining = True
        if not self._streams:
            return
        self._idle.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            log.warning("%d requests did not end within %.0f s", len(self._streams), seconds)

    async def close(self, drain: float = 0.0) -> None:
        """Refuse new requests, give those in flight `drain` seconds, then end everything."""
        self.draining = True
        if drain:
            await self.drain(drain)
        for key in list(self._streams):
            stream = self._streams[key]
            self._handle(Cancel(key))
            if stream.error is None:
                stream.end(EngineDead("The server is stopping."))
        await self._stop()

    async def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._supervisor is not None:
            await self._supervisor.stop()
            self._supervisor = None
        if self._reader is not None:
            self._reader.close()
        if self._run_dir is not None:
            self._run_dir.remove()
            self._run_dir = None

    def submit(
        self,
        pipeline: str,
        params: dict[str, Any],
        *,
        request_id: str,
        seed: int | None = None,
        gapless: bool = True,
        timeout: float | None = None,
        arrays: Mapping[str, Any] | None = None,
        outputs: tuple[str, ...] = (),
    ) -> ResultStream:
        """Begin a request. Its stream raises the request's error; `Overloaded` is raised at once.

        `arrays` (numpy) go to the stages with it; `outputs` names the final stages that are wanted.
        """
        if self._supervisor is None:
            raise EngineDead("The engine is not running.")
        if self.draining:
            raise Overloaded("The server is shutting down.", retry_after=5.0)
        key = next(self._keys)
        tensors, frames = pack(arrays or {}, arena=None, request=key, seq=0)
        stream = self._streams[key] = ResultStream(key, request_id, self._on_taken)
        self._handle(
            Submit(
                key=key,
                request_id=request_id,
                pipeline=pipeline,
                params=params,
                seed=self._random.getrandbits(32) if seed is None else seed,
                gapless=gapless,
                deadline=time.monotonic() + (timeout or self.config.request_timeout),
                tensors=tensors,
                frames=frames,
                outputs=outputs,
            )
        )
        if isinstance(stream.error, Overloaded):
            raise stream.error
        return stream

    def cancel(self, key: int) -> None:
        """Forget a request; nothing happens when it has ended."""
        if key in self._streams:
            self._handle(Cancel(key))

    def _on_taken(self, key: int, stage: str, count: int) -> None:
        self._handle(Taken(key, stage, count))

    def _on_message(self, replica: str, message: WorkerMessage, frames: Sequence[Any]) -> None:
        if isinstance(message, Output) and message.tensors:
            self._bytes[replica] = self._bytes.get(replica, 0) + sum(map(nbytes, message.tensors.values()))
        self._handle(FromWorker(replica, message, frames))

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        if self._supervisor is not None:
            self._supervisor.on_heartbeat(beat)

    def _handle(self, event: Event) -> None:
        for action in self.scheduler.handle(event, time.monotonic()):
            match action:
                case Send():
                    if self._supervisor is not None:
                        self._supervisor.send(action.replica, action.message, action.frames)
                case Deliver():
                    self._deliver(action)
                case End():
                    self._end(action)
        self._arm()

    def _deliver(self, action: Deliver) -> None:
        output, stream = action.output, self._streams[action.key]
        arrays: dict[str, Any] = {}
        if output.tensors:
            try:
                arrays = self._arrays(action)
            except (ValueError, OSError) as error:
                message = f"Stage {action.stage} sent a chunk that cannot be read: {error}"
                failed = StageFailed(message, stage=action.stage)
                stream.end(failed)
                # Not at once: the scheduler's other actions for this request are still to be done.
                asyncio.get_running_loop().call_soon(self._handle, Cancel(action.key, failed))
                return
        stream.put(Delivery(action.stage, output.meta, arrays, output.duration))

    def _arrays(self, action: Deliver) -> dict[str, Any]:
        """The chunk's arrays; those in shared memory copied, for their lease ends with the credit and
        the caller may keep them for ever."""
        tensors = action.output.tensors
        arrays = unpack(tensors, action.frames, self._reader)
        return {name: np.array(a) if tensors[name].segment else a for name, a in arrays.items()}

    def _end(self, action: End) -> None:
        stream = self._streams.pop(action.key)
        stream.end(action.error)
        if not self._streams:
            self._idle.set()
        for observer in self.observers:
            observer(action.record)

    def _arm(self) -> None:
        wake_at = self.scheduler.wake_at
        if self._timer is not None:
            if wake_at is not None and self._timer_at <= wake_at:
                return
            self._timer.cancel()
            self._timer = None
        if wake_at is not None:
            self._timer_at = wake_at
            delay = max(0.0, wake_at - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._handle(Tick())

    def health(self) -> Health:
        """The state of every stage."""
        stages = tuple(self._stage_status(*key) for key in self.scheduler.pools)
        return Health(
            ready=bool(stages) and not self.draining and all(s.state != "down" for s in stages),
            draining=self.draining,
            stages=stages,
            late_messages=self.scheduler.late_messages,
        )

    def _stage_status(self, pipeline: str, stage: str) -> StageStatus:
        pool = self.scheduler.pools[pipeline, stage]
        replicas = {} if self._supervisor is None else self._supervisor.replicas
        statuses = tuple(replicas[name].status() for name in pool.replicas if name in replicas)  # type: ignore[union-attr]
        up = len(pool.available)
        return StageStatus(
            pipeline=pipeline,
            stage=stage,
            kind=pool.stage.kind,
            state="down" if not up else "ready" if up == len(pool.replicas) else "degraded",
            replicas_up=up,
            replicas=statuses,
            waiting=len(pool.waiting),
            running=pool.running,
            transfer_bytes=sum(self._bytes.get(name, 0) for name in pool.replicas),
        )
