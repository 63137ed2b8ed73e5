"""`AsyncOmni` and `Omni` inside a program of one's own, with real stages."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from omni_async import AsyncOmni, Echo, InvalidRequest, NotFound, Omni, ServerConfig, Speech, TextChunk


def test_omni_is_the_same_without_asyncio() -> None:
    with Omni(model="echo") as omni:
        texts = [
            chunk.text for chunk in omni.generate(Echo(text="hi", chunks=3)) if isinstance(chunk, TextChunk)
        ]
        assert texts == ["hi"] * 3
        left = omni.generate(Echo(text="hi", chunks=100_000))
        next(left)
        left.close()
        assert [chunk.request_id != "" for chunk in omni.generate(Echo(text="again"))] == [True]
        assert omni.health().ready
        with pytest.raises(InvalidRequest, match="/v1/echo"):
            list(omni.generate(Speech(input="Hello.", model="echo")))
    assert not omni.health().ready


@pytest.mark.parametrize("single_process", [False, True], ids=["processes", "one process"])
async def test_leaving_the_loop_cancels_the_request(single_process: bool) -> None:
    server = ServerConfig(single_process=single_process)
    async with AsyncOmni(model="echo", server=server) as omni:
        async with asyncio.timeout(20):
            async for _ in omni.generate(Echo(text="hi", chunks=100_000)):
                break
            while any(stage.running for stage in omni.health().stages):
                await asyncio.sleep(0.01)
            with pytest.raises(NotFound):
                await anext(omni.generate(Echo(text="hi", model="nobody")))


async def test_speech_is_the_same_in_one_process_as_in_several() -> None:
    heard: list[np.ndarray] = []
    for single_process in (False, True):
        async with AsyncOmni(model="hibari", server=ServerConfig(single_process=single_process)) as omni:
            speech = Speech(input="One sentence, and no more.", seed=3)
            heard.append(np.concatenate([chunk.pcm async for chunk in omni.generate(speech)]))  # type: ignore[union-attr]
    assert np.array_equal(heard[0], heard[1])
    assert len(heard[0]) > 24000
