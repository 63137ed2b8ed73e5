"""The supervisor: starts workers, waits until they are ready, watches, kills and restarts them.

It knows nothing of requests. What a worker's end means for them is the scheduler's to say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from omni_async.config import PipelineConfig, ServerConfig, StageConfig
from omni_async.errors import EngineDead, OmniError
from omni_async.launcher import Handle, Launcher
from omni_async.messages import (
    SCHEDULING,
    Configure,
    EngineMessage,
    Fatal,
    Heartbeat,
    Hello,
    Ready,
    Stop,
    WorkerMessage,
)
from omni_async.pool import replica_names
from omni_async.restarts import RestartBudget
from omni_async.status import ReplicaState, ReplicaStatus
from omni_async.transports.channel import ChannelClosed, ChannelFull

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.5
STOP_SECONDS = 5.0
"""What a worker gets to close its model after `Stop`, before it is killed."""

SILENCE_SECONDS = 10.0
"""A ready worker sends a heartbeat each second, whatever it computes; this long without one is a hang."""


class Replica:
    """One worker that is kept running."""

    def __init__(self, name: str, stage: StageConfig, budget: int) -> None:
        self.name = name
        self.stage = stage
        self.state: ReplicaState = "starting"
        self.handle: Handle | None = None
        self.restarts = RestartBudget(budget)
        self.beat: Heartbeat | None = None
        self.beat_at = 0.0
        self.error: OmniError | None = None
        self.kill_reason = ""

    def status(self) -> ReplicaStatus:
        """As health and metrics show it."""
        beat = self.beat
        return ReplicaStatus(
            name=self.name,
            state=self.state,
            pid=self.handle.pid if self.handle else None,
            running=beat.running if beat else 0,
            steps=beat.steps if beat else 0,
            batch_size=beat.batch_size if beat else 0.0,
            last_step_age=beat.last_step_age if beat else 0.0,
            restarts=self.restarts.total,
        )


class Supervisor:
    """All workers of one engine.

    `on_message(replica, message, frames)`, `on_up(replica)` and `on_down(replica, reason, permanent)`
    are called on the event loop.
    """

    def __init__(
        self,
        pipelines: Sequence[PipelineConfig],
        config: ServerConfig,
        launcher: Launcher,
        *,
        on_message: Callable[[str, WorkerMessage, Sequence[Any]], None],
        on_up: Callable[[str], None],
        on_down: Callable[[str, str, bool], None],
    ) -> None:
        self.config = config
        self.launcher = launcher
        self.on_message = on_message
        self.on_up = on_up
        self.on_down = on_down
        self.replicas = {
            name: Replica(name, stage, config.restart_budget)
            for pipeline in pipelines
            for stage in pipeline.stages
            for name in replica_names(pipeline.name, stage)
        }
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._stopping = False

    async def start(self) -> None:
        """Start every worker and return when all are ready.

        Raises the error of the first that cannot start, or `EngineDead` naming those that are late.
        """
        self._tasks = [asyncio.create_task(self._keep(r), name=r.name) for r in self.replicas.values()]
        self._tasks.append(asyncio.create_task(self._watch(), name="watch"))
        began = time.monotonic()
        while missing := [r for r in self.replicas.values() if r.state != "ready"]:
            if failed := next((r for r in missing if r.error is not None), None):
                assert failed.error is not None
                raise failed.error
            left = began + min(map(self._init_timeout, missing)) - time.monotonic()
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, left))
            except TimeoutError:
                names = ", ".join(r.name for r in missing)
                seconds = time.monotonic() - began
                raise EngineDead(f"Not ready after {seconds:.0f} s, still waiting for: {names}.") from None

    def _init_timeout(self, replica: Replica) -> float:
        return replica.stage.init_timeout or self.config.stage_init_timeout

    async def _keep(self, replica: Replica) -> None:
        """Start, watch and restart one worker until the engine stops or its budget is spent."""
        while True:
            reason = await self._run_once(replica)
            if self._stopping:
                return
            never_loaded = replica.error is not None and replica.restarts.total == 0
            delay = None if never_loaded else replica.restarts.next_delay(time.monotonic())
            replica.state = "failed" if delay is None else "down"
            log.error(
                "worker %s is gone: %s%s", replica.name, reason, "" if delay is None else "; restarting"
            )
            self.on_down(replica.name, reason, delay is None)
            self._changed.set()
            if delay is None:
                replica.error = replica.error or EngineDead(
                    f"Worker {replica.name} does not stay up: {reason}."
                )
                return
            await asyncio.sleep(delay)

    async def _run_once(self, replica: Replica) -> str:
        """One life of a worker; returns why it ended."""
        replica.state, replica.beat, replica.kill_reason = "starting", None, ""
        replica.beat_at = time.monotonic()
        limit = replica.stage.inline_limit
        replica.handle = handle = await self.launcher.launch(replica.name, replica.stage)
        try:
            handle.channel.start(
                lambda message, frames: self._on_message(replica, message, frames),
                lambda error: self.kill(replica.name, f"it sent what is no message ({error})"),
            )
            handle.channel.send(
                Configure(
                    stage=msgspec.to_builtins(replica.stage),
                    arena_bytes=self.config.arena_bytes,
                    inline_limit=self.config.inline_limit if limit is None else limit,
                )
            )
            ended = await handle.wait()
            return replica.kill_reason or (replica.error.message if replica.error else ended)
        finally:
            handle.kill()
            handle.channel.close()

    def _on_message(self, replica: Replica, message: WorkerMessage, frames: Sequence[Any]) -> None:
        if isinstance(message, SCHEDULING):
            self.on_message(replica.name, message, frames)
            return
        match message:
            case Ready():
                log.info("worker %s is ready after %.1f s", replica.name, message.load_seconds)
                replica.state, replica.error = "ready", None
                replica.beat_at = time.monotonic()
                self._changed.set()
                self.on_up(replica.name)
            case Fatal():
                replica.error = OmniError.from_info(message.error)
            case Hello():
                pass
            case Heartbeat():
                self.on_heartbeat(message)

    def on_heartbeat(self, beat: Heartbeat) -> None:
        """Note a sign of life."""
        replica = self.replicas.get(beat.replica)
        if replica is not None:
            replica.beat, replica.beat_at = beat, time.monotonic()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for replica in self.replicas.values():
                if replica.state == "ready" and (reason := self._hung(replica)):
                    self.kill(replica.name, reason)

    def _hung(self, replica: Replica) -> str:
        limit = self.config.stage_hang_timeout
        if replica.beat is None:
            return ""
        silent = time.monotonic() - replica.beat_at
        if silent > max(limit, SILENCE_SECONDS):
            return f"no heartbeat for {silent:.0f} s"
        if replica.beat.busy_seconds + silent > limit:
            return f"a step has been running for {replica.beat.busy_seconds + silent:.0f} s"
        return ""

    def kill(self, name: str, reason: str) -> None:
        """End a worker that cannot be relied on; it is restarted within its budget."""
        replica = self.replicas[name]
        replica.kill_reason = reason
        replica.state = "hung"
        if replica.handle is not None:
            replica.handle.kill()

    def send(self, name: str, message: EngineMessage, frames: Sequence[Any] = ()) -> None:
        """Send to a worker. One that is gone is passed over: its `on_down` is on the way; one that
        does not read is killed, for credits keep a healthy worker's queue far below its bound."""
        handle = self.replicas[name].handle
        if handle is None:
            return
        try:
            handle.channel.send(message, frames)
        except ChannelClosed:
            return
        except ChannelFull:
            self.kill(name, "it does not read its queue")

    async def stop(self) -> None:
        """Stop every worker: `Stop`, then a deadline, then SIGKILL."""
        self._stopping = True
        keepers = [task for task in self._tasks if task.get_name() != "watch"]
        for task in self._tasks:
            if task not in keepers:
                task.cancel()
        for replica in self.replicas.values():
            if replica.state == "ready":
                self.send(replica.name, Stop())
            elif replica.handle is not None:
                replica.handle.kill()
        if keepers:
            _, late = await asyncio.wait(keepers, timeout=STOP_SECONDS)
            for task in late:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.launcher.close()
