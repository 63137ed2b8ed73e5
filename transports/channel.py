"""What every transport offers: a bounded, ordered, two-way channel of messages with frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

Buffer = bytes | bytearray | memoryview
In = TypeVar("In", covariant=True)
Out = TypeVar("Out", contravariant=True)


class AsyncChannel(Protocol, Generic[In, Out]):
    """The engine's end: never blocks, calls back on the event loop.

    `start` begins to deliver `on_message(message, frames)` in order; the frames are buffers owned by
    the receiver. What is no message goes to `on_malformed(error)`, if that is given, else to the loop's
    exception handler; delivery goes on. `send` raises `ChannelFull` at the high-water mark and
    `ChannelClosed` after `close`.
    """

    address: str

    def start(
        self,
        on_message: Callable[[In, Sequence[memoryview]], None],
        on_malformed: Callable[[Exception], None] | None = None,
    ) -> None: ...

    def send(self, message: Out, frames: Sequence[Buffer] = ()) -> None: ...

    def close(self) -> None: ...


class SyncChannel(Protocol, Generic[In, Out]):
    """The worker's end: one thread, blocking with a time-out.

    `recv(timeout)` returns the next message and its frames, or None when `timeout` seconds pass
    (0: do not wait). `send` waits while the queue is full.
    """

    def recv(self, timeout: float | None) -> tuple[In, Sequence[memoryview]] | None: ...

    def send(self, message: Out, frames: Sequence[Buffer] = ()) -> None: ...

    def close(self) -> None: ...


class ChannelFull(Exception):
    """The peer does not take messages and the high-water mark is reached."""


class ChannelClosed(Exception):
    """The channel was closed."""
