"""The life of a worker between `Configure` and `Stop`, the same in a process and in a thread."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from omni_async.config import StageConfig
from omni_async.errors import OmniError, StageFailed
from omni_async.messages import Configure, EngineMessage, Fatal, Hello, Ready, WorkerMessage
from omni_async.stages.executor import Executor
from omni_async.stages.worker import Worker
from omni_async.transports.channel import SyncChannel
from omni_async.transports.shm import Arena, ArenaReader

log = logging.getLogger(__name__)

Channel = SyncChannel[EngineMessage, WorkerMessage]


def handshake(channel: Channel) -> Configure:
    """Say `Hello` and wait for `Configure`."""
    channel.send(Hello(pid=os.getpid()))
    first = channel.recv(None)
    if first is None or not isinstance(first[0], Configure):
        raise TypeError("the first message must be Configure")
    return first[0]


def serve(
    channel: Channel,
    configure: Configure,
    run_dir: Path,
    arena_name: str,
    create: Callable[[StageConfig], Executor],
    on_worker: Callable[[Worker], None],
) -> int:
    """Load the executor, say `Ready`, run the loop. Returns 0 after `Stop`, 1 when loading failed."""
    config = msgspec.convert(configure.stage, StageConfig)
    began = time.monotonic()
    try:
        executor = create(config)
        executor.load()
    except Exception as error:
        log.error("stage %s did not load", config.name, exc_info=error)
        channel.send(Fatal(error=_as_omni_error(error, config).info()))
        return 1
    arena = Arena(run_dir, arena_name, configure.arena_bytes)
    reader = ArenaReader(run_dir)
    worker = Worker(channel, config, executor, arena, reader, inline_limit=configure.inline_limit)
    on_worker(worker)
    channel.send(Ready(load_seconds=time.monotonic() - began))
    try:
        worker.run()
    finally:
        executor.close()
        arena.close()
        reader.close()
    return 0


def _as_omni_error(error: Exception, config: StageConfig) -> OmniError:
    if isinstance(error, OmniError):
        return error
    return StageFailed(
        f"Stage {config.name} did not load: {type(error).__name__}: {error}", stage=config.name
    )
