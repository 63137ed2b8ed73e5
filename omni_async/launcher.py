"""Starting workers: as processes over ZeroMQ, or as threads over in-memory channels.

Stages are named by string only: nothing of theirs is imported into the engine's process unless
they run there.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from omni_async import logs
from omni_async.config import StageConfig
from omni_async.environment import worker_environment
from omni_async.messages import EngineMessage, Heartbeat, WorkerMessage
from omni_async.transports.channel import AsyncChannel
from omni_async.transports.memory import memory_pair
from omni_async.transports.zeromq import AsyncZmqChannel, MonitorReceiver

Channel = AsyncChannel[WorkerMessage, EngineMessage]


class Handle(Protocol):
    """A started worker."""

    channel: Channel
    pid: int | None

    async def wait(self) -> str:
        """Wait for its end; the reason as a clause."""
        ...

    def kill(self) -> None:
        """End it now. A thread can only be asked to."""
        ...


class Launcher(Protocol):
    """Starts workers. `launch` returns before the worker is ready."""

    async def launch(self, replica: str, stage: StageConfig) -> Handle: ...

    def close(self) -> None: ...


class ProcessHandle:
    """A worker process."""

    def __init__(self, channel: Channel, process: asyncio.subprocess.Process) -> None:
        self.channel = channel
        self.process = process
        self.pid: int | None = process.pid

    async def wait(self) -> str:
        """Wait for its end."""
        code = await self.process.wait()
        return f"its process was killed by signal {-code}" if code < 0 else f"its process exited with {code}"

    def kill(self) -> None:
        """SIGKILL."""
        if self.process.returncode is None:
            self.process.kill()


class ProcessLauncher:
    """One process per replica, on this machine."""

    def __init__(self, run_dir: Path, on_heartbeat: Callable[[Heartbeat], None]) -> None:
        self.run_dir = run_dir
        self.monitor = MonitorReceiver(f"ipc://{run_dir}/monitor")
        self.monitor.start(on_heartbeat)
        self._launched = 0

    async def launch(self, replica: str, stage: StageConfig) -> ProcessHandle:
        """Bind the channel, then start the process that connects to it."""
        self._launched += 1
        channel: Channel = AsyncZmqChannel(f"ipc://{self.run_dir}/{self._launched}")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "omni_async.stages.process"),
            *(channel.address, self.monitor.address, replica, str(self.run_dir)),
            *(logs.current_format(), logs.current_level()),
            stdin=asyncio.subprocess.PIPE,
            env=worker_environment(stage.env),
        )
        return ProcessHandle(channel, process)

    def close(self) -> None:
        """Close the heartbeat socket."""
        self.monitor.close()


class ThreadHandle:
    """A worker thread."""

    def __init__(self, channel: Channel, ended: Awaitable[str], stop: Callable[[], None]) -> None:
        self.channel = channel
        self.pid: int | None = None
        self._ended = ended
        self._stop = stop

    async def wait(self) -> str:
        """Wait for its end."""
        return await self._ended

    def kill(self) -> None:
        """Close its channel, at which it ends after the present step."""
        self._stop()


class ThreadLauncher:
    """One thread per replica, in this process; `create` replaces the look-up of executors in tests."""

    def __init__(self, run_dir: Path, create: Callable[[StageConfig], Any] | None = None) -> None:
        self.run_dir = run_dir
        self.create = create

    async def launch(self, replica: str, stage: StageConfig) -> ThreadHandle:
        """Start the thread."""
        loop = asyncio.get_running_loop()
        near, far = memory_pair(loop)
        ended: asyncio.Future[str] = loop.create_future()

        def on_exit(reason: str) -> None:
            loop.call_soon_threadsafe(_settle, ended, reason)

        module = importlib.import_module("omni_async.stages.thread")
        extra = {} if self.create is None else {"create": self.create}
        thread = module.WorkerThread(far, replica, self.run_dir, on_exit, **extra)
        thread.start()
        return ThreadHandle(near, ended, far.close)

    def close(self) -> None:
        """Nothing is shared between threads."""


def _settle(future: asyncio.Future[str], reason: str) -> None:
    if not future.done():
        future.set_result(reason)
