"""What the supervisor does about workers that are late, dead, hung or talk nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from omni_async.config import ServerConfig, StageConfig
from omni_async.errors import ConfigError, EngineDead
from omni_async.launcher import Channel
from omni_async.messages import EngineMessage, Fatal, Heartbeat, Ready, Stop, WorkerMessage
from omni_async.supervisor import Supervisor
from tests.inproc.scripted import PIPELINE

OnMessage = Callable[[WorkerMessage, Sequence[memoryview]], None]
OnMalformed = Callable[[Exception], None]


class FakeWorker:
    """A worker that says what the test makes it say; its own channel and handle."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.address = "fake"
        self.channel: Channel = self
        self.pid: int | None = None
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.on_malformed: OnMalformed | None = None

    def start(self, on_message: OnMessage, on_malformed: OnMalformed | None = None) -> None:
        self.say, self.on_malformed = (lambda message: on_message(message, ())), on_malformed

    def send(self, message: EngineMessage, frames: Sequence[Any] = ()) -> None:
        if isinstance(message, Stop):
            self.kill()

    def close(self) -> None:
        """Nothing to close."""

    async def wait(self) -> str:
        return await asyncio.shield(self.ended)

    def kill(self) -> None:
        if not self.ended.done():
            self.ended.set_result("it was killed")


class FakeLauncher:
    """Workers say `first` as soon as they start."""

    def __init__(self, first: Callable[[str], WorkerMessage | None]) -> None:
        self.first = first
        self.workers: list[FakeWorker] = []

    async def launch(self, replica: str, stage: StageConfig) -> FakeWorker:
        worker = FakeWorker(replica)
        self.workers.append(worker)
        if (message := self.first(replica)) is not None:
            asyncio.get_running_loop().call_soon(self._begin, worker, message)
        return worker

    def _begin(self, worker: FakeWorker, message: WorkerMessage) -> None:
        worker.say(message)
        if isinstance(message, Fatal):
            worker.kill()

    def close(self) -> None:
        """Nothing to close."""


class Watched:
    """A supervisor and what it has told."""

    def __init__(self, launcher: FakeLauncher, **server: Any) -> None:
        self.launcher = launcher
        self.downs: asyncio.Queue[tuple[str, str, bool]] = asyncio.Queue()
        self.ups: asyncio.Queue[str] = asyncio.Queue()
        self.supervisor = Supervisor(
            (PIPELINE,),
            ServerConfig(**server),
            launcher,
            on_message=lambda *_: None,
            on_up=self.ups.put_nowait,
            on_down=lambda *args: self.downs.put_nowait(args),
        )


@asynccontextmanager
async def watched(first: Callable[[str], WorkerMessage | None], **server: Any) -> AsyncIterator[Watched]:
    """Stopped at the end."""
    made = Watched(FakeLauncher(first), **server)
    try:
        async with asyncio.timeout(20):
            yield made
    finally:
        for worker in made.launcher.workers:
            worker.kill()
        await made.supervisor.stop()


def ready(replica: str) -> WorkerMessage:
    """Every worker is ready at once."""
    return Ready(load_seconds=0.0)


async def test_a_time_out_names_who_is_missing() -> None:
    async with watched(lambda r: ready(r) if "source" in r else None, stage_init_timeout=0.2) as w:
        with pytest.raises(EngineDead, match=r"waiting for: p\.double\.0"):
            await w.supervisor.start()


async def test_a_model_that_does_not_load_stops_the_start_with_its_own_error() -> None:
    broken = Fatal(error=ConfigError("no such weights").info())
    async with watched(lambda r: ready(r) if "source" in r else broken) as w:
        with pytest.raises(ConfigError, match="no such weights"):
            await w.supervisor.start()


async def test_a_worker_that_talks_nonsense_is_replaced() -> None:
    async with watched(ready) as w:
        await w.supervisor.start()
        first = w.launcher.workers[0]
        assert first.on_malformed is not None
        first.on_malformed(ValueError("no message"))
        name, reason, permanent = await w.downs.get()
        assert (name, permanent) == (first.replica, False)
        assert "no message" in reason
        while await w.ups.get() != first.replica or len(w.launcher.workers) < 3:
            pass
        assert w.supervisor.replicas[first.replica].status().restarts == 1


async def test_a_worker_whose_step_does_not_end_is_replaced() -> None:
    async with watched(ready, stage_hang_timeout=5.0) as w:
        await w.supervisor.start()
        name = w.launcher.workers[0].replica
        hung = Heartbeat(replica=name, steps=1, running=1, last_step_age=6.0, busy_seconds=6.0)
        w.supervisor.on_heartbeat(hung)
        down, reason, _ = await w.downs.get()
        assert down == name
        assert "a step has been running for" in reason


async def test_a_worker_that_does_not_stay_up_is_given_up_within_its_budget() -> None:
    async with watched(ready, restart_budget=2) as w:
        await w.supervisor.start()
        name = w.launcher.workers[0].replica
        ends: list[bool] = []
        while not ends or not ends[-1]:
            latest = [worker for worker in w.launcher.workers if worker.replica == name][-1]
            latest.kill()
            ends.append((await w.downs.get())[2])
            if not ends[-1]:
                while (await w.ups.get()) != name or w.supervisor.replicas[name].state != "ready":
                    pass
        assert ends == [False, False, True]
        assert w.supervisor.replicas[name].status().state == "failed"
