"""The other process of the channel tests: `python -m tests.process.zeromq_peers ROLE ADDRESS`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np

from omni_async.messages import Abort, Credit, Heartbeat, Hello, Output, Stop
from omni_async.transports.channel import ChannelFull
from omni_async.transports.shm import Arena, pack
from omni_async.transports.zeromq import AsyncZmqChannel, MonitorSender, SyncZmqChannel

ROOT = Path(__file__).parents[2]
SECONDS = 20


def echo(address: str) -> None:
    """Answer each `Abort` with an `Output` of the same number and frames until `Stop`."""
    channel = SyncZmqChannel(address)
    while (item := channel.recv(SECONDS)) is not None and not isinstance(item[0], Stop):
        assert isinstance(item[0], Abort)
        channel.send(Output(request=item[0].request, seq=0), item[1])
    channel.close()


def deaf(address: str) -> None:
    """Connect, say `Hello`, and then read nothing until told to; then count."""
    channel = SyncZmqChannel(address, high_water=4)
    channel.send(Hello(pid=0))
    sys.stdin.readline()
    while (item := channel.recv(SECONDS)) is not None and isinstance(item[0], Abort):
        channel.send(Hello(pid=item[0].request))
    channel.close()


def last_words(address: str) -> None:
    """Say a good deal and leave at once, without the interpreter's clean-up."""
    channel = SyncZmqChannel(address)
    for pid in range(200):
        channel.send(Hello(pid=pid), [bytes(10_000)])
    channel.close()
    os._exit(0)


def producer(address: str) -> None:
    """Send arrays through the arena, waiting for a credit after each."""
    folder = Path(address.removeprefix("ipc://")).parent
    channel, arena = SyncZmqChannel(address), Arena(folder, "producer", 32 << 20)
    for seq in range(8):
        refs, frames = pack({"x": np.full(1 << 20, seq, np.float32)}, arena=arena, request=1, seq=seq)
        channel.send(Output(request=1, seq=seq, tensors=refs, final=seq == 7), frames)
        item = channel.recv(SECONDS)
        assert item is not None
        assert isinstance(item[0], Credit)
        arena.release(1, item[0].upto)
        arena.check()
    arena.close()
    channel.close()


def heart(address: str) -> None:
    """Send heartbeats until killed."""
    sender = MonitorSender(address)
    for steps in range(1_000_000):
        sender.send(beat(steps))
        sys.stdin.readline()


def beat(steps: int) -> Heartbeat:
    """A heartbeat."""
    return Heartbeat(replica="talker.0", steps=steps, running=0, last_step_age=0.0, busy_seconds=0.0)


@contextlib.contextmanager
def peer(role: Callable[[str], None], address: str) -> Generator[subprocess.Popen[bytes]]:
    """The other process; killed in the end if it still runs."""
    command = [sys.executable, "-m", "tests.process.zeromq_peers", role.__name__, address]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


class Inbox:
    """Collects messages and lets a test wait for a number of them."""

    def __init__(self) -> None:
        self.items: list[tuple[Any, Any]] = []
        self._arrived = asyncio.Event()

    def __call__(self, message: Any, frames: Any = ()) -> None:
        self.items.append((message, frames))
        self._arrived.set()

    async def wait_for(self, count: int) -> list[Any]:
        async with asyncio.timeout(SECONDS):
            while len(self.items) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return [message for message, _ in self.items]


async def ended(process: subprocess.Popen[bytes]) -> int:
    """The exit status, without blocking the loop."""
    return await asyncio.to_thread(process.wait, SECONDS)


async def fill(channel: AsyncZmqChannel, limit: int) -> int:
    """Send until the channel raises `ChannelFull`, at most `limit` messages; how many it took."""
    sent = 0
    async with asyncio.timeout(SECONDS):
        with contextlib.suppress(ChannelFull):
            while sent < limit:
                channel.send(Abort(request=sent), [bytes(100_000)])
                sent += 1
                await asyncio.sleep(0)
    return sent


if __name__ == "__main__":
    roles = {role.__name__: role for role in (echo, deaf, last_words, producer, heart)}
    roles[sys.argv[1]](sys.argv[2])
