"""Waits for events of a ZeroMQ socket on an event loop, without `zmq.asyncio`.

A plain socket and `loop.add_reader` on its descriptor: no future per message, and the same under
asyncio and uvloop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import zmq


class SocketPump:
    """Calls `work()` on the running loop while the socket has events that `wanted()` names.

    ZeroMQ's descriptor is edge-triggered: it becomes readable once when the state changes, and any
    send or receive may take that edge away. So `rearm()` must follow every use of the socket outside
    `work`; inside, the pump looks again by itself, unless `work` returns True: its last use of the
    socket found nothing left to do. One call of `work` should do a bounded amount: the rest follows in
    the loop's next turn, after everybody else's callbacks.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], work: Callable[[], bool], wanted: Callable[[], int]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._work = work
        self._wanted = wanted
        self._turn: asyncio.Handle | None = None
        self._closed = self._working = False
        self._fd = cast(int, socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._run)
        self.rearm()

    def rearm(self) -> None:
        """Run `work` in the loop's next turn if the socket has events."""
        if self._turn is not None or self._working or self._closed:
            return
        if cast(int, self._socket.get(zmq.EVENTS)) & self._wanted():
            self._turn = self._loop.call_soon(self._run)

    def close(self) -> None:
        """Call `work` no more; must come before the socket is closed."""
        if self._closed:
            return
        self._closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        if self._turn is not None:
            self._turn.cancel()

    def _run(self) -> None:
        # The reader may fire with a turn still scheduled; one of the two is enough.
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._working = True
        drained = False
        try:
            drained = self._work()
        finally:
            self._working = False
            # Also after an exception, or the messages behind the bad one would wait for ever.
            if not drained:
                self.rearm()
