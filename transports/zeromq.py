"""Channels between processes over ZeroMQ: one PAIR per replica, one PUSH/PULL for all heartbeats.

The engine binds, workers connect. Addresses are `ipc://PATH` or `tcp://HOST:PORT` (port 0: any free
one; `address` tells which). Encryption and authentication are not here: ipc sockets lie in the
server's private folder, and tcp belongs on a private network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import zmq

from omni_async.messages import EngineMessage, Heartbeat, WorkerMessage
from omni_async.transports.channel import Buffer, ChannelClosed, ChannelFull
from omni_async.transports.codec import MalformedMessage, engine_codec, heartbeat_codec, worker_codec
from omni_async.transports.pump import SocketPump

HIGH_WATER = 1024
"""Messages a queue holds. A replica of 64 slots with a window of 8 chunks has at most 64 × (8 inputs +
submit, abort and a credit) ≈ 700 messages under way, so that only a peer that does not read gets here."""

MONITOR_HIGH_WATER = 64
"""A second of heartbeats from 64 workers; older ones are worth nothing."""

HEARTBEAT_HIGH_WATER = 2
"""The heartbeat that is leaving, whose place ZeroMQ gives back up to a millisecond late, and the next."""

BURST = 32
"""Messages taken per turn of the event loop: about 0.2 ms, less than a loop's other callbacks notice."""

COPY_BELOW = 32 * 1024
"""Smaller frames are copied out (≤ 2 µs): a view would keep ZeroMQ's receive buffer alive, which holds
other messages too. From here on the view is cheaper than the copy (1 MiB: 2 µs against 38 µs)."""

# As plain integers: pyzmq's flags are enumerations, whose `&` costs more than asking the socket.
READABLE, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)

LINGER_MS = 1000
"""What a closed channel gets to send its last messages. A dead peer costs no more than this."""


class AsyncZmqChannel:
    """The engine's end of a replica's channel; an `AsyncChannel`. Binds at once."""

    def __init__(self, address: str, *, high_water: int = HIGH_WATER) -> None:
        self._codec = engine_codec()
        self._high_water = high_water
        # A PAIR without a peer takes nothing, and the worker connects later than the first message.
        self._backlog: deque[list[Buffer]] = deque()
        self._socket = _socket(_context(), zmq.PAIR, high_water)
        self.address = _bind(self._socket, address)
        self._pump: SocketPump | None = None
        self._on_message: Callable[[WorkerMessage, Sequence[memoryview]], None] = _unstarted
        self._on_malformed: Callable[[Exception], None] | None = None

    def start(
        self,
        on_message: Callable[[WorkerMessage, Sequence[memoryview]], None],
        on_malformed: Callable[[Exception], None] | None = None,
    ) -> None:
        """Deliver on the running event loop, as `AsyncChannel` says. What the callbacks raise goes to
        the loop's exception handler; delivery goes on."""
        self._on_message = on_message
        self._on_malformed = on_malformed
        self._pump = SocketPump(self._socket, self._work, self._wanted)

    def send(self, message: EngineMessage, frames: Sequence[Buffer] = ()) -> None:
        """Queue a message; the frames may be changed afterwards. Raises as `AsyncChannel` says."""
        if self._socket.closed:
            raise ChannelClosed(self.address)
        parts = self._codec.encode(message, frames)
        if self._backlog or not _try_send(self._socket, parts):
            if len(self._backlog) >= self._high_water:
                raise ChannelFull(self.address)
            self._backlog.append([bytes(part) for part in parts])
        if self._pump is not None:
            self._pump.rearm()

    def close(self) -> None:
        """Stop delivering. Returns at once; what is queued has `LINGER_MS` to leave."""
        if self._pump is not None:
            self._pump.close()
        self._flush()
        self._socket.close(LINGER_MS)

    def _wanted(self) -> int:
        return READABLE | WRITABLE if self._backlog else READABLE

    def _work(self) -> bool:
        self._flush()
        for _ in range(BURST):
            # The callback may close the channel.
            if self._socket.closed or (parts := _try_recv(self._socket)) is None:
                return not self._backlog
            try:
                message, frames = self._codec.decode(parts)
            except MalformedMessage as error:
                if self._on_malformed is None:
                    raise
                self._on_malformed(error)
            else:
                self._on_message(message, frames)
        return False

    def _flush(self) -> None:
        while self._backlog and not self._socket.closed and _try_send(self._socket, self._backlog[0]):
            self._backlog.popleft()


class SyncZmqChannel:
    """The worker's end of its channel; a `SyncChannel`, to be used by one thread."""

    def __init__(self, address: str, *, high_water: int = HIGH_WATER) -> None:
        self.address = address
        self._codec = worker_codec()
        # A context of its own: ending it is how `close` waits until the last messages have left.
        self._context = zmq.Context()
        self._socket = _socket(self._context, zmq.PAIR, high_water)
        self._socket.connect(address)
        self._timeout_ms = -1

    def recv(self, timeout: float | None) -> tuple[EngineMessage, Sequence[memoryview]] | None:
        """The next message, or None after `timeout` seconds.

        Raises `MalformedMessage` and `ChannelClosed`.
        """
        if self._socket.closed:
            raise ChannelClosed(self.address)
        parts = _try_recv(self._socket, self._wait_flags(timeout))
        return None if parts is None else self._codec.decode(parts)

    def send(self, message: WorkerMessage, frames: Sequence[Buffer] = ()) -> None:
        """Send, waiting while the queue is full. The frames may be changed afterwards."""
        if self._socket.closed:
            raise ChannelClosed(self.address)
        self._socket.send_multipart(self._codec.encode(message, frames))

    def close(self) -> None:
        """Give the last messages at most `LINGER_MS` to leave, then let go of the socket."""
        if not self._socket.closed:
            self._socket.close(LINGER_MS)
            self._context.term()

    def _wait_flags(self, timeout: float | None) -> int:
        if timeout is not None and timeout <= 0:
            return zmq.NOBLOCK
        wait_ms = -1 if timeout is None else max(1, round(timeout * 1000))
        if wait_ms != self._timeout_ms:
            self._socket.set(zmq.RCVTIMEO, wait_ms)
            self._timeout_ms = wait_ms
        return 0


class MonitorReceiver:
    """The engine's end of the heartbeats of all workers. Binds at once."""

    def __init__(self, address: str) -> None:
        self._codec = heartbeat_codec()
        self._socket = _socket(_context(), zmq.PULL, MONITOR_HIGH_WATER)
        self.address = _bind(self._socket, address)
        self._pump: SocketPump | None = None
        self._on_heartbeat: Callable[[Heartbeat], None] = _unstarted

    def start(self, on_heartbeat: Callable[[Heartbeat], None]) -> None:
        """Deliver to `on_heartbeat` on the running event loop."""
        self._on_heartbeat = on_heartbeat
        self._pump = SocketPump(self._socket, self._work, lambda: READABLE)

    def close(self) -> None:
        """Stop delivering."""
        if self._pump is not None:
            self._pump.close()
        self._socket.close(0)

    def _work(self) -> bool:
        for _ in range(BURST):
            if self._socket.closed or (parts := _try_recv(self._socket)) is None:
                return True
            self._on_heartbeat(self._codec.decode(parts)[0])
        return False


class MonitorSender:
    """A worker's heartbeats; to be made and used by one thread. Never blocks."""

    def __init__(self, address: str) -> None:
        self._codec = heartbeat_codec()
        # Not the channel's context, whose end would wait for this socket.
        self._socket = _socket(_context(), zmq.PUSH, HEARTBEAT_HIGH_WATER)
        self._socket.connect(address)

    def send(self, beat: Heartbeat) -> bool:
        """Send; False when the receiver is not taking: a later heartbeat says all that this one does."""
        return _try_send(self._socket, self._codec.encode(beat))

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close(0)


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """The process's context: one IO thread for all channels of an engine."""
    return zmq.Context.instance()  # pyright: ignore[reportUnknownVariableType]  # pyzmq leaves it open


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, high_water: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set(zmq.SNDHWM, high_water)
    socket.set(zmq.RCVHWM, high_water)
    socket.set(zmq.LINGER, LINGER_MS)
    return socket


def _bind(socket: zmq.Socket[bytes], address: str) -> str:
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close(0)
        raise
    return cast(bytes, socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def _try_send(socket: zmq.Socket[bytes], parts: Sequence[Buffer]) -> bool:
    # Copied by ZeroMQ. Sending views instead saves a fifth of the time from 1 MiB on, where frames are
    # the exception, and nothing below; it takes a thread in which pyzmq collects the views, and
    # forbids the sender to touch its buffer.
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _try_recv(socket: zmq.Socket[bytes], flags: int = zmq.NOBLOCK) -> list[Buffer] | None:
    try:
        frame = socket.recv(flags, copy=False)
    except zmq.Again:
        return None
    parts = [_owned(frame)]
    while frame.more:
        frame = socket.recv(copy=False)
        parts.append(_owned(frame))
    return parts


def _owned(frame: zmq.Frame) -> Buffer:
    return frame.bytes if len(frame) < COPY_BELOW else frame.buffer


def _unstarted(*_: object) -> None:
    raise AssertionError("nothing is delivered before start")
