"""Channels between two real processes: order, big frames, bounds, dead peers, both event loops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
import zmq

from omni_async.messages import Abort, Credit, Hello, Stop
from omni_async.transports import zeromq as zeromq_module
from omni_async.transports.channel import ChannelClosed
from omni_async.transports.codec import MalformedMessage
from omni_async.transports.run_dir import RunDir
from omni_async.transports.shm import ArenaReader, unpack
from omni_async.transports.zeromq import (
    BURST,
    COPY_BELOW,
    AsyncZmqChannel,
    SyncZmqChannel,
)
from tests.process.zeromq_peers import (
    SECONDS,
    Inbox,
    deaf,
    echo,
    ended,
    fill,
    last_words,
    peer,
    producer,
)

both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Any], Any]


@pytest.fixture
def address() -> Iterator[str]:
    run_dir = RunDir.create()
    yield f"ipc://{run_dir.path}/1"
    run_dir.remove()


@both_loops
@pytest.mark.parametrize("tcp", [False, True], ids=["ipc", "tcp"])
def test_messages_sent_before_the_worker_connects_and_after_arrive_in_order(
    run: Run, tcp: bool, address: str
) -> None:
    async def main() -> None:
        channel, inbox = AsyncZmqChannel("tcp://127.0.0.1:0" if tcp else address), Inbox()
        channel.start(inbox)
        for number in range(200):
            channel.send(Abort(request=number), [b"%d" % number])
        with peer(echo, channel.address) as process:
            for number in range(200, 1000):
                channel.send(Abort(request=number), [b"%d" % number])
                if number % 50 == 0:
                    await inbox.wait_for(number - 150)
            channel.send(Stop())
            messages = await inbox.wait_for(1000)
            assert await ended(process) == 0
        assert [message.request for message in messages] == list(range(1000))
        assert [bytes(frames[0]) for _, frames in inbox.items] == [b"%d" % n for n in range(1000)]
        channel.close()

    run(main())


@both_loops
def test_a_reply_is_seen_at_once_however_sends_and_receives_interleave(run: Run, address: str) -> None:
    async def main() -> None:
        channel, inbox = AsyncZmqChannel(address), Inbox()
        channel.start(inbox)
        with peer(echo, address):
            for number in range(2000):
                channel.send(Abort(request=number))
                if number % 3 == 0:
                    await inbox.wait_for(number + 1)
            await inbox.wait_for(2000)
        channel.close()

    run(main())


@both_loops
def test_frames_of_every_size_arrive_whole(run: Run, address: str) -> None:
    async def main() -> None:
        channel, inbox = AsyncZmqChannel(address), Inbox()
        channel.start(inbox)
        rng = np.random.default_rng(0)
        sizes = [0, 1, COPY_BELOW - 1, COPY_BELOW, 1 << 20, 16 << 20]
        frames = [rng.bytes(size) for size in sizes]
        with peer(echo, address):
            channel.send(Abort(request=1), frames)
            await inbox.wait_for(1)
        received = inbox.items[0][1]
        assert [bytes(frame) for frame in received] == frames
        assert all(isinstance(frame, memoryview) and frame.readonly for frame in received)
        channel.close()

    run(main())


def test_frames_may_be_changed_once_they_are_sent(address: str) -> None:
    async def main() -> None:
        channel, inbox = AsyncZmqChannel(address), Inbox()
        channel.start(inbox)
        buffer = bytearray(1 << 20)
        for number in range(3):
            buffer[:] = bytes([number]) * len(buffer)
            channel.send(Abort(request=number), [buffer])
        buffer[:] = b"x" * len(buffer)
        with peer(echo, address):
            await inbox.wait_for(3)
        assert [bytes(frames[0][:1]) for _, frames in inbox.items] == [b"\0", b"\1", b"\2"]
        channel.close()

    asyncio.run(main())


@both_loops
def test_tensors_pass_through_shared_memory_and_it_is_reused(run: Run, address: str) -> None:
    async def main() -> None:
        channel, reader = AsyncZmqChannel(address), ArenaReader(Path(address[6:]).parent)
        inbox = Inbox()

        def on_message(message: Any, frames: Any) -> None:
            view = unpack(message.tensors, frames, reader)["x"]
            assert message.tensors["x"].segment
            assert view.min() == view.max() == message.seq
            channel.send(Credit(request=1, upto=message.seq + 1, due_in=0.0))
            inbox(message.tensors["x"])

        channel.start(on_message)
        with peer(producer, address) as process:
            refs = await inbox.wait_for(8)
            assert await ended(process) == 0
        assert {ref.offset for ref in refs} == {0}
        channel.close()
        reader.close()

    run(main())


@both_loops
def test_a_flood_of_messages_leaves_turns_of_the_loop_to_others(run: Run, address: str) -> None:
    async def main() -> None:
        channel, inbox = AsyncZmqChannel(address), Inbox()
        with peer(last_words, address) as process:
            assert await ended(process) == 0
        seen = [0]

        def look() -> None:
            seen.append(len(inbox.items))
            if seen[-1] < 200:
                asyncio.get_running_loop().call_soon(look)

        channel.start(inbox)
        look()
        await inbox.wait_for(200)
        assert max(after - before for before, after in pairwise(seen)) <= BURST < 200
        channel.close()

    run(main())


@both_loops
def test_a_malformed_message_and_an_error_of_the_receiver_do_not_stop_what_follows(
    run: Run, address: str
) -> None:
    async def main() -> None:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, info: errors.append(info["exception"]))
        channel, inbox = AsyncZmqChannel(address), Inbox()

        def on_message(message: Any, frames: Any) -> None:
            if message == Hello(pid=0):
                raise LookupError("the receiver's own")
            inbox(message, frames)

        channel.start(on_message)
        with zmq.Context() as context, context.socket(zmq.PAIR) as raw:
            raw.connect(address)
            raw.send(b"\xc1")
            for pid in range(3):
                raw.send(zeromq_module.worker_codec().encode(Hello(pid=pid))[0])
            assert await inbox.wait_for(2) == [Hello(pid=1), Hello(pid=2)]
        assert [type(error) for error in errors] == [MalformedMessage, LookupError]
        channel.close()

    run(main())


async def test_a_malformed_message_is_told_to_who_asked_for_it(address: str) -> None:
    channel, inbox, told = AsyncZmqChannel(address), Inbox(), list[Exception]()
    channel.start(inbox, told.append)
    with zmq.Context() as context, context.socket(zmq.PAIR) as raw:
        raw.connect(address)
        raw.send(b"\xc1")
        raw.send(zeromq_module.worker_codec().encode(Hello(pid=1))[0])
        assert await inbox.wait_for(1) == [Hello(pid=1)]
    assert [type(error) for error in told] == [MalformedMessage]
    channel.close()


async def test_a_receiver_may_close_the_channel_in_the_middle_of_a_burst(address: str) -> None:
    channel, closed = AsyncZmqChannel(address), asyncio.Event()

    def on_message(*_: Any) -> None:
        assert not closed.is_set()
        channel.close()
        closed.set()

    with peer(last_words, address) as process:
        assert await ended(process) == 0
    channel.start(on_message)
    async with asyncio.timeout(SECONDS):
        await closed.wait()
    with pytest.raises(ChannelClosed):
        channel.send(Stop())


@both_loops
def test_a_worker_that_does_not_read_fills_the_engine_end_and_loses_nothing(run: Run, address: str) -> None:
    async def main() -> None:
        channel, inbox = AsyncZmqChannel(address, high_water=4), Inbox()
        channel.start(inbox)
        with peer(deaf, address) as process:
            await inbox.wait_for(1)
            sent = await fill(channel, 1000)
            assert 8 <= sent < 100
            assert process.stdin is not None
            process.stdin.write(b"read\n")
            process.stdin.flush()
            messages = await inbox.wait_for(sent + 1)
            assert [message.pid for message in messages[1:]] == list(range(sent))
            channel.send(Stop())
            assert await ended(process) == 0
        channel.close()

    run(main())


async def test_without_a_worker_the_queue_is_bounded(address: str) -> None:
    channel = AsyncZmqChannel(address, high_water=10)
    channel.start(Inbox())
    assert await fill(channel, 1000) == 10
    channel.close()


async def test_a_worker_waits_while_the_engine_does_not_read(address: str) -> None:
    channel, inbox = AsyncZmqChannel(address, high_water=4), Inbox()
    worker = SyncZmqChannel(address, high_water=4)

    def talk() -> None:
        for pid in range(500):
            worker.send(Hello(pid=pid), [bytes(100_000)])

    thread = threading.Thread(target=talk)
    thread.start()
    await asyncio.to_thread(thread.join, 0.2)
    assert thread.is_alive()
    channel.start(inbox)
    assert await inbox.wait_for(500) == [Hello(pid=pid) for pid in range(500)]
    thread.join()
    worker.close()
    channel.close()


async def test_what_a_worker_said_last_arrives_although_it_left_at_once(address: str) -> None:
    channel, inbox = AsyncZmqChannel(address), Inbox()
    channel.start(inbox)
    with peer(last_words, address) as process:
        assert await ended(process) == 0
        assert await inbox.wait_for(200) == [Hello(pid=pid) for pid in range(200)]
    channel.close()


async def test_a_killed_worker_blocks_neither_send_nor_close(address: str) -> None:
    channel, inbox = AsyncZmqChannel(address, high_water=4), Inbox()
    channel.start(inbox)
    with peer(deaf, address) as process:
        await inbox.wait_for(1)
        await fill(channel, 1000)
        process.kill()
        await ended(process)
    began = time.monotonic()
    await fill(channel, 1000)
    channel.close()
    channel.close()
    assert time.monotonic() - began < 0.5
    with pytest.raises(ChannelClosed):
        channel.send(Stop())


async def test_a_dead_engine_holds_a_closing_worker_no_longer_than_the_linger(address: str) -> None:
    engine = AsyncZmqChannel(address)
    worker = SyncZmqChannel(address)
    worker.send(Hello(pid=1))
    engine.close()
    for pid in range(20):
        worker.send(Hello(pid=pid), [bytes(100_000)])
    began = time.monotonic()
    await asyncio.to_thread(worker.close)
    assert time.monotonic() - began < zeromq_module.LINGER_MS / 1000 + 1
    worker.close()
    for use in (lambda: worker.recv(0), lambda: worker.send(Hello(pid=1))):
        with pytest.raises(ChannelClosed):
            use()


def test_recv_waits_as_long_as_it_is_told(address: str) -> None:
    worker = SyncZmqChannel(address)
    for timeout in (0.0, 0.05, 0.2, 0.0):
        began = time.monotonic()
        assert worker.recv(timeout) is None
        assert timeout * 0.9 <= time.monotonic() - began < timeout + 1
    worker.close()


def test_an_address_that_is_taken_is_an_error_at_once(address: str) -> None:
    first = AsyncZmqChannel("tcp://127.0.0.1:0")
    with pytest.raises(zmq.ZMQError, match="in use"):
        AsyncZmqChannel(first.address)
    first.close()


def test_a_closed_loop_does_not_keep_a_channel_from_closing(address: str) -> None:
    channel = AsyncZmqChannel(address)

    async def main() -> None:
        channel.start(Inbox())

    asyncio.run(main())
    channel.close()
