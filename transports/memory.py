"""A channel inside one process: an event loop on one end, a worker thread on the other.

For tests and `--single-process`. Messages go through the codec and frames are copied, so that what
would not survive a socket does not survive here either.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from omni_async.messages import EngineMessage, WorkerMessage
from omni_async.transports.channel import AsyncChannel, Buffer, ChannelClosed, ChannelFull, SyncChannel
from omni_async.transports.codec import Codec, engine_codec, worker_codec

HIGH_WATER = 1024
"""As in `zeromq.py`."""

BURST = 32
"""Messages delivered per turn of the event loop."""

Parts = list[Buffer]
In = TypeVar("In")
Out = TypeVar("Out")


def memory_pair(
    loop: asyncio.AbstractEventLoop, *, high_water: int = HIGH_WATER
) -> tuple[AsyncChannel[WorkerMessage, EngineMessage], SyncChannel[EngineMessage, WorkerMessage]]:
    """The engine's end, for `loop`, and the worker's end, for one other thread.

    Each direction holds `high_water` messages. Closing either end closes the channel: the other end
    still gets what was queued for it, and then `ChannelClosed`. The worker's end may be closed from any
    thread, which wakes its own.
    """
    to_worker, to_engine = _Queue(high_water), _Queue(high_water)
    near = _AsyncEnd(loop, engine_codec(), to_worker, to_engine)
    return near, _SyncEnd(worker_codec(), to_worker, to_engine, near.wake)


class _Queue:
    """One direction: bounded, thread-safe, closed by either side."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._items: deque[Parts] = deque()
        self._changed = threading.Condition()
        self._writable = self._readable = True

    def put(self, parts: Parts, *, wait: bool) -> None:
        """Append; full means wait, or `ChannelFull`."""
        with self._changed:
            while wait and self._writable and len(self._items) >= self._bound:
                self._changed.wait()
            if not self._writable:
                raise ChannelClosed("the in-memory channel is closed")
            if len(self._items) >= self._bound:
                raise ChannelFull("the in-memory channel is full")
            self._items.append(parts)
            self._changed.notify_all()

    def get(self, timeout: float | None) -> Parts | None:
        """The oldest, or None after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or not self._writable, timeout)
            if not self._readable or not (self._items or self._writable):
                raise ChannelClosed("the in-memory channel is closed")
            if not self._items:
                return None
            self._changed.notify_all()
            return self._items.popleft()

    def close(self, *, reader: bool) -> None:
        """Take no more; a reader that closes does not want what is queued either."""
        with self._changed:
            self._writable = False
            self._readable = self._readable and not reader
            self._changed.notify_all()

    def __len__(self) -> int:
        return len(self._items)


class _AsyncEnd(Generic[In, Out]):
    address = "memory"

    def __init__(
        self, loop: asyncio.AbstractEventLoop, codec: Codec[Out, In], out: _Queue, inbox: _Queue
    ) -> None:
        self._loop = loop
        self._codec = codec
        self._out = out
        self._inbox = inbox
        self._closed = self._scheduled = False
        self._on_message: Callable[[In, Sequence[memoryview]], None] | None = None

    def start(
        self,
        on_message: Callable[[In, Sequence[memoryview]], None],
        on_malformed: Callable[[Exception], None] | None = None,
    ) -> None:
        # What the other end sends has come through the same codec: nothing here is malformed.
        self._on_message = on_message
        self.wake()

    def send(self, message: Out, frames: Sequence[Buffer] = ()) -> None:
        self._out.put(_copied(self._codec.encode(message, frames)), wait=False)

    def close(self) -> None:
        self._closed = True
        self._out.close(reader=False)
        self._inbox.close(reader=True)

    def wake(self) -> None:
        """Deliver soon; called by the other thread after each message."""
        # One turn for many messages: a turn each would add up to more than a burst.
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError as error:
            self._scheduled = False
            raise ChannelClosed("the event loop is closed") from error

    def _deliver(self) -> None:
        # Before the queue is looked at, so that a message put from now on schedules a turn of its own.
        self._scheduled = False
        if self._on_message is None:
            return
        try:
            for _ in range(BURST):
                if self._closed or not self._inbox or (parts := self._inbox.get(0)) is None:
                    return
                self._on_message(*self._codec.decode(parts))
        finally:
            # Also after an exception of the callback: the messages behind it must not wait.
            if self._inbox and not self._closed:
                self.wake()


class _SyncEnd(Generic[In, Out]):
    def __init__(self, codec: Codec[Out, In], inbox: _Queue, out: _Queue, wake: Callable[[], None]) -> None:
        self._codec = codec
        self._inbox = inbox
        self._out = out
        self._wake = wake

    def recv(self, timeout: float | None) -> tuple[In, Sequence[memoryview]] | None:
        parts = self._inbox.get(timeout)
        return None if parts is None else self._codec.decode(parts)

    def send(self, message: Out, frames: Sequence[Buffer] = ()) -> None:
        self._out.put(_copied(self._codec.encode(message, frames)), wait=True)
        self._wake()

    def close(self) -> None:
        self._out.close(reader=False)
        self._inbox.close(reader=True)


def _copied(parts: Parts) -> Parts:
    return [bytes(part) for part in parts]
