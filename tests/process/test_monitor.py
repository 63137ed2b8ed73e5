"""Heartbeats: many workers, one receiver, and nobody who waits for anybody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from omni_async.transports.run_dir import RunDir
from omni_async.transports.zeromq import MonitorReceiver, MonitorSender
from tests.process.zeromq_peers import Inbox, beat, heart, peer

both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
Run = Callable[[Any], Any]


@pytest.fixture
def address() -> Iterator[str]:
    run_dir = RunDir.create()
    yield f"ipc://{run_dir.path}/monitor"
    run_dir.remove()


@both_loops
def test_heartbeats_of_several_workers_reach_one_receiver(run: Run, address: str) -> None:
    async def main() -> None:
        receiver, inbox = MonitorReceiver(address), Inbox()
        receiver.start(inbox)
        with peer(heart, receiver.address) as one, peer(heart, receiver.address) as other:
            beats = await inbox.wait_for(2)
            assert [each.steps for each in beats] == [0, 0]
            for process in (one, other):
                assert process.stdin is not None
                process.stdin.write(b"next\n")
                process.stdin.flush()
            beats = await inbox.wait_for(4)
            assert [each.steps for each in beats[2:]] == [1, 1]
        receiver.close()

    run(main())


def test_heartbeats_without_a_receiver_are_given_up_and_never_block(address: str) -> None:
    sender = MonitorSender(address)
    assert [sender.send(beat(steps)) for steps in range(4)] == [True, True, False, False]
    sender.close()
