"""A worker in a thread of the engine's own process, for `--single-process` and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from omni_async.config import StageConfig
from omni_async.stages.executor import Executor
from omni_async.stages.registry import create_executor
from omni_async.stages.serve import Channel, handshake, serve
from omni_async.stages.worker import Worker


class WorkerThread(threading.Thread):
    """Serves one replica; `on_exit(reason)` is called from the thread when it ends."""

    def __init__(
        self,
        channel: Channel,
        replica: str,
        run_dir: Path,
        on_exit: Callable[[str], None],
        create: Callable[[StageConfig], Executor] = create_executor,
    ) -> None:
        super().__init__(name=replica, daemon=True)
        self.channel = channel
        self.run_dir = run_dir
        self.on_exit = on_exit
        self.create = create
        self.worker: Worker | None = None

    def run(self) -> None:
        """Until `Stop`, or until the executor does not load."""
        reason = "its thread ended"
        try:
            configure = handshake(self.channel)
            serve(self.channel, configure, self.run_dir, self.name, self.create, self._watch)
        except BaseException as error:
            reason = f"its thread raised {type(error).__name__}: {error}"
            raise
        finally:
            self.on_exit(reason)

    def _watch(self, worker: Worker) -> None:
        self.worker = worker
