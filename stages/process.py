"""The entry point of a worker process: `python -m omni_async.stages.process` ADDRESS MONITOR REPLICA
RUN_DIR LOG_FORMAT LOG_LEVEL.

It ends with its parent: by PR_SET_PDEATHSIG where Linux has it, and by the end of its standard
input everywhere.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from omni_async import logs
from omni_async.messages import Heartbeat
from omni_async.stages.registry import create_executor
from omni_async.stages.serve import handshake, serve
from omni_async.stages.worker import Progress, Worker
from omni_async.transports.run_dir import remove_tree
from omni_async.transports.zeromq import MonitorSender, SyncZmqChannel

HEARTBEAT_SECONDS = 1.0
PR_SET_PDEATHSIG = 1
PARENT_END_SECONDS = 1.0


def main(argv: list[str]) -> int:
    """Serve one replica; the exit status is 0 after `Stop`, 1 when the model did not load."""
    address, monitor, replica, folder, log_format, log_level = argv
    run_dir = Path(folder)
    die_with_parent(run_dir)
    logs.setup(log_format, log_level)
    channel = SyncZmqChannel(address)
    try:
        configure = handshake(channel)
        heartbeat = HeartbeatThread(monitor, replica)
        heartbeat.start()
        name = f"{replica}-{os.getpid()}"
        return serve(channel, configure, run_dir, name, create_executor, heartbeat.watch)
    finally:
        channel.close()


class HeartbeatThread(threading.Thread):
    """Says every second how far the loop is, also while a step runs."""

    def __init__(self, monitor: str, replica: str) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.monitor = monitor
        self.replica = replica
        self.progress = Progress(last_step=time.monotonic())

    def watch(self, worker: Worker) -> None:
        """Tell of `worker` from now on."""
        self.progress = worker.progress

    def run(self) -> None:
        """Until the process ends."""
        sender = MonitorSender(self.monitor)
        while True:
            sender.send(beat(self.replica, self.progress, time.monotonic()))
            time.sleep(HEARTBEAT_SECONDS)


def beat(replica: str, progress: Progress, now: float) -> Heartbeat:
    """The heartbeat that tells of `progress` at `now`."""
    began = progress.step_began
    return Heartbeat(
        replica=replica,
        steps=progress.steps,
        running=progress.running,
        last_step_age=now - progress.last_step if progress.running else 0.0,
        busy_seconds=0.0 if began is None else now - began,
        batch_size=progress.rows / progress.steps if progress.steps else 0.0,
    )


def die_with_parent(run_dir: Path) -> None:
    """End when the parent ends, and take the server's run folder along: nobody else is left to.

    The terminal's Ctrl-C goes to the whole group, so it is ignored: the engine decides when workers
    leave.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: _leave(run_dir))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_watch_parent, args=(run_dir,), name="parent-watch", daemon=True).start()


def _leave(run_dir: Path) -> None:
    # The kernel sends the signal when the parent's thread dies, a moment before its files are closed.
    ended, _, _ = select.select([0], [], [], PARENT_END_SECONDS)
    if ended:
        remove_tree(run_dir)
    os._exit(0)


def _watch_parent(run_dir: Path) -> None:
    # Standard input is a pipe that only the engine holds: it ends when the engine does.
    while os.read(0, 4096):
        pass
    remove_tree(run_dir)
    os._exit(0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
