"""The in-memory channel keeps the contract of a real one: order, bounds, copies, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import uvloop

from omni_async.messages import Abort, Hello, Output, Stop
from omni_async.transports.channel import ChannelClosed, ChannelFull
from omni_async.transports.memory import BURST, memory_pair

Run = Callable[[Any], Any]
both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


class Inbox:
    """Collects messages and lets a test wait for a number of them."""

    def __init__(self) -> None:
        self.items: list[tuple[Any, list[bytes]]] = []
        self._arrived = asyncio.Event()

    def __call__(self, message: Any, frames: Any) -> None:
        self.items.append((message, [bytes(frame) for frame in frames]))
        self._arrived.set()

    async def wait_for(self, count: int) -> list[Any]:
        async with asyncio.timeout(10):
            while len(self.items) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return [message for message, _ in self.items]


@both_loops
def test_messages_of_both_directions_arrive_in_order_with_their_frames(run: Run) -> None:
    async def main() -> None:
        near, far = memory_pair(asyncio.get_running_loop())

        def echo() -> None:
            while (item := far.recv(10)) is not None and not isinstance(item[0], Stop):
                assert isinstance(item[0], Abort)
                far.send(Output(request=item[0].request, seq=0), item[1])

        inbox = Inbox()
        near.start(inbox)
        worker = threading.Thread(target=echo)
        worker.start()
        for request in range(500):
            near.send(Abort(request=request), [b"%d" % request, b""])
        near.send(Stop())
        await inbox.wait_for(500)
        assert [(m.request, f) for m, f in inbox.items] == [(n, [b"%d" % n, b""]) for n in range(500)]
        worker.join()
        near.close()

    run(main())


async def test_what_came_before_start_is_delivered_after_it() -> None:
    near, far = memory_pair(asyncio.get_running_loop())
    far.send(Hello(pid=1))
    await asyncio.sleep(0)
    inbox = Inbox()
    near.start(inbox)
    assert await inbox.wait_for(1) == [Hello(pid=1)]


async def test_frames_are_copied_when_they_are_sent() -> None:
    near, far = memory_pair(asyncio.get_running_loop())
    frame = bytearray(b"before")
    near.send(Stop(), [frame])
    frame[:] = b"after!"
    item = far.recv(0)
    assert item is not None
    assert bytes(item[1][0]) == b"before"
    assert item[1][0].readonly


async def test_a_message_that_no_socket_would_carry_is_refused() -> None:
    near, far = memory_pair(asyncio.get_running_loop())
    with pytest.raises(TypeError):
        near.send(Hello(pid=1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError):
        far.send(Output(request=1, seq=0, meta={"model": object()}))
    assert far.recv(0) is None


async def test_recv_returns_nothing_when_its_time_is_over() -> None:
    _, far = memory_pair(asyncio.get_running_loop())
    assert far.recv(0) is None
    assert far.recv(0.01) is None


async def test_a_full_engine_end_raises_and_takes_messages_again_when_the_worker_reads() -> None:
    near, far = memory_pair(asyncio.get_running_loop(), high_water=3)
    for request in range(3):
        near.send(Abort(request=request))
    with pytest.raises(ChannelFull):
        near.send(Abort(request=3))
    assert far.recv(0) == (Abort(request=0), [])
    near.send(Abort(request=4))
    assert [far.recv(0) for _ in range(4)] == [*((Abort(request=n), []) for n in (1, 2, 4)), None]


async def test_a_worker_waits_while_its_queue_is_full() -> None:
    near, far = memory_pair(asyncio.get_running_loop(), high_water=2)
    worker = threading.Thread(target=lambda: [far.send(Hello(pid=pid)) for pid in range(50)])
    worker.start()
    inbox = Inbox()
    worker.join(0.05)
    assert worker.is_alive()
    near.start(inbox)
    assert await inbox.wait_for(50) == [Hello(pid=pid) for pid in range(50)]
    worker.join()


async def test_a_burst_leaves_turns_of_the_loop_to_others() -> None:
    near, far = memory_pair(asyncio.get_running_loop())
    for pid in range(4 * BURST):
        far.send(Hello(pid=pid))
    inbox = Inbox()
    seen: list[int] = []

    def look() -> None:
        seen.append(len(inbox.items))
        if seen[-1] < 4 * BURST:
            asyncio.get_running_loop().call_soon(look)

    near.start(inbox)
    look()
    await inbox.wait_for(4 * BURST)
    assert max(after - before for before, after in pairwise(seen)) == BURST


async def test_an_error_of_the_receiver_does_not_stop_the_messages_behind() -> None:
    loop = asyncio.get_running_loop()
    errors: list[Any] = []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    near, far = memory_pair(loop)
    inbox = Inbox()

    def on_message(message: Any, frames: Any) -> None:
        if message == Hello(pid=0):
            raise LookupError("the receiver's own")
        inbox(message, frames)

    near.start(on_message)
    for pid in range(3):
        far.send(Hello(pid=pid))
    assert await inbox.wait_for(2) == [Hello(pid=1), Hello(pid=2)]
    assert [type(error) for error in errors] == [LookupError]


async def test_closing_the_engine_end_lets_the_worker_read_what_was_queued() -> None:
    near, far = memory_pair(asyncio.get_running_loop())
    near.send(Stop())
    near.close()
    near.close()
    assert far.recv(None) == (Stop(), [])
    with pytest.raises(ChannelClosed):
        far.recv(None)
    for send in (lambda: far.send(Hello(pid=1)), lambda: near.send(Stop())):
        with pytest.raises(ChannelClosed):
            send()


async def test_closing_the_worker_end_wakes_a_worker_that_waits_to_receive() -> None:
    near, far = memory_pair(asyncio.get_running_loop())
    ended = asyncio.create_task(asyncio.to_thread(far.recv, None))
    await asyncio.sleep(0)
    far.close()
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(ended, 10)
    with pytest.raises(ChannelClosed):
        near.send(Stop())


async def test_closing_the_worker_end_wakes_a_worker_that_waits_to_send() -> None:
    near, far = memory_pair(asyncio.get_running_loop(), high_water=1)
    far.send(Hello(pid=1))
    ended = asyncio.create_task(asyncio.to_thread(far.send, Hello(pid=2)))
    await asyncio.sleep(0)
    far.close()
    with pytest.raises(ChannelClosed):
        await asyncio.wait_for(ended, 10)
    inbox = Inbox()
    near.start(inbox)
    assert await inbox.wait_for(1) == [Hello(pid=1)]


def test_a_worker_whose_loop_has_ended_learns_that_the_channel_is_closed() -> None:
    loop = asyncio.new_event_loop()
    _, far = memory_pair(loop)
    loop.close()
    with pytest.raises(ChannelClosed, match="loop"):
        far.send(Hello(pid=1))
