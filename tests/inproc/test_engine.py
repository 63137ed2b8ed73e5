"""The engine, the worker loop and the scheduler together, with scripted executors in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from omni_async.errors import EngineDead, InvalidRequest, Overloaded, StageFailed
from omni_async.messages import Output, TensorRef
from tests.inproc.scripted import PIPELINE, Source, collect, scripted, values


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for `condition`, which no event announces."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("size", [4, 100_000], ids=["inline", "shared memory"])
async def test_chunks_come_in_order_and_whole(size: int) -> None:
    async with scripted() as s:
        assert values(await collect(s.submit(count=30, start=5, size=size))) == [
            2.0 * (5 + i) for i in range(30)
        ]
        assert s.held() == 0


async def test_without_room_in_shared_memory_chunks_ride_inline() -> None:
    async with scripted(arena_bytes=0) as s:
        assert values(await collect(s.submit(count=10, size=100_000))) == [2.0 * i for i in range(10)]


async def test_many_requests_at_once_each_equal_their_solo_run() -> None:
    async with scripted() as s:
        wanted = [(i * 100, 3 + i % 7, 4 if i % 2 else 50_000) for i in range(40)]
        streams = [s.submit(start=start, count=count, size=size) for start, count, size in wanted]
        answers = await asyncio.gather(*map(collect, streams))
        for (start, count, _), answer in zip(wanted, answers, strict=True):
            assert values(answer) == [2.0 * (start + i) for i in range(count)]
        assert max(s.executors["source"].batches) > 1


async def test_a_slow_reader_slows_only_its_own_request() -> None:
    async with scripted() as s:
        slow = s.submit(count=1000)
        assert values([await anext(slow)]) == [0.0]
        assert len(await collect(s.submit(count=200))) == 200
        made = s.engine.scheduler.requests[slow.key].runs["source"].produced
        assert made < 20
        s.engine.cancel(slow.key)
        await until(lambda: s.held() == 0)


async def test_leaving_early_frees_every_stage() -> None:
    async with scripted() as s:
        for _ in range(50):
            stream = s.submit(count=1000, size=20_000)
            await anext(stream)
            s.engine.cancel(stream.key)
        await until(lambda: s.held() == 0)
        assert not s.engine.scheduler.requests
        assert values(await collect(s.submit(count=3))) == [0.0, 2.0, 4.0]


async def test_a_failed_row_fails_alone() -> None:
    async with scripted() as s:
        Source.gates["go"] = threading.Event()
        gate = s.submit(count=1, gate="go")
        good = [s.submit(count=5) for _ in range(3)]
        bad = s.submit(count=5, fail_at=2)
        Source.gates["go"].set()
        await collect(gate)
        for stream in good:
            assert len(await collect(stream)) == 5
        with pytest.raises(StageFailed, match="scripted failure") as caught:
            await collect(bad)
        assert caught.value.stage == "source"
        await until(lambda: s.held() == 0)


async def test_a_chunk_that_cannot_be_sent_fails_its_request_and_not_the_worker() -> None:
    async with scripted() as s:
        with pytest.raises(StageFailed):
            await collect(s.submit(count=5, poison_at=1))
        assert len(await collect(s.submit(count=5))) == 5


async def test_a_chunk_that_cannot_be_read_fails_its_request_at_once_and_everywhere() -> None:
    async with scripted() as s:
        stream = s.submit(count=100_000)
        await anext(stream)
        request = s.engine.scheduler.requests[stream.key]
        bad = Output(
            request=request.wire,
            seq=request.runs["double"].produced,
            tensors={"x": TensorRef("float32", (4,), segment="../elsewhere")},
        )
        s.engine._on_message("p.double.0", bad, ())
        with pytest.raises(StageFailed, match="cannot be read") as caught:
            await collect(stream)
        assert caught.value.stage == "double"
        await until(lambda: s.held() == 0 and not s.engine.scheduler.requests)
        assert len(await collect(s.submit(count=5))) == 5


async def test_an_invalid_request_is_refused_by_its_own_error() -> None:
    async with scripted() as s:
        with pytest.raises(InvalidRequest, match="refused by the stage") as caught:
            await collect(s.submit(count=5, invalid=True))
        assert caught.value.param == "invalid"


async def test_over_concurrency_queues_and_then_refuses() -> None:
    stages = (replace(PIPELINE.stages[0], max_num_seqs=1), PIPELINE.stages[1])
    async with scripted(replace(PIPELINE, stages=stages), max_queue=2) as s:
        Source.gates["hold"] = threading.Event()
        streams = [s.submit(count=2, gate="hold") for _ in range(3)]
        with pytest.raises(Overloaded) as caught:
            s.submit(count=2)
        assert caught.value.retry_after is not None
        Source.gates["hold"].set()
        assert [len(await collect(stream)) for stream in streams] == [2, 2, 2]


async def test_a_deadline_ends_one_request_and_its_work() -> None:
    async with scripted() as s:
        late = s.engine.submit("p", {"count": 100_000}, request_id="late", timeout=0.05)
        first = await anext(late)
        assert first.stage == "double"
        await until(lambda: late.ended)
        assert late.error is not None
        assert "deadline" in late.error.message
        await until(lambda: s.held() == 0)
        assert len(await collect(s.submit(count=5))) == 5


async def test_closing_tells_those_who_wait() -> None:
    async with scripted() as s:
        stream = s.submit(count=100_000)
        await anext(stream)
        await s.engine.close()
        with pytest.raises(EngineDead):
            await collect(stream)
        with pytest.raises(EngineDead):
            s.submit(count=1)


async def test_draining_lets_those_in_flight_finish_and_refuses_new_ones() -> None:
    async with scripted() as s:
        stream = s.submit(count=50)
        answer = asyncio.create_task(collect(stream))
        await anext(s.submit(count=1))
        closing = asyncio.create_task(s.engine.close(drain=10.0))
        await until(lambda: s.engine.draining)
        with pytest.raises(Overloaded):
            s.submit(count=1)
        assert len(await answer) == 50
        await closing


async def test_records_tell_how_each_request_went() -> None:
    async with scripted() as s:
        records = []
        s.engine.observers.append(records.append)
        await collect(s.submit(count=3))
        with pytest.raises(StageFailed):
            await collect(s.submit(count=3, fail_at=0))
        assert [record.reason for record in records] == ["stop", "failed"]
        assert records[0].media_seconds == pytest.approx(0.3)
        assert records[0].first_chunk_seconds <= records[0].total_seconds
