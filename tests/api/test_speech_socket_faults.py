from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fake_omni import CHUNK, FakeOmni, Gate, Seen, failing
from serving import next_event, serve, until, until_event
from socket_talk import close_code, say, session
from websockets.asyncio.client import connect

from omni_async.api.app import create_app
from omni_async.api.config import ApiConfig
from omni_async.errors import Overloaded, StageFailed
from omni_async.speech import Speech


async def test_errors_are_told_and_the_session_goes_on() -> None:
    async with session(FakeOmni()) as socket:
        wrong = [
            ('{"type": "input.text", "text": 1}', "text"),
            ('{"type": "input.text", "text": "a", "x": 1}', "x"),
            ("nonsense", None),
        ]
        for message, param in wrong:
            await socket.send(message)
            event = await next_event(socket)
            assert (event["type"], event["param"]) == ("error", param)
        await say(socket, "input.text", text="😀")
        await say(socket, "input.flush")
        assert (await next_event(socket))["code"] == "nothing_to_speak"
        await say(socket, "input.text", text="Fine.")
        await say(socket, "input.done")
        assert (await until_event(socket, "session.done"))[0][-1]["total_sentences"] == 1


async def test_a_session_that_is_not_configured_in_time_is_closed_with_1008() -> None:
    async with (
        serve(create_app(FakeOmni(), ApiConfig(ws_config_timeout=0.05))) as address,
        connect(f"ws://{address}/v1/audio/speech/stream", proxy=None) as socket,
    ):
        assert (await next_event(socket))["code"] == "timeout"
        assert await close_code(socket) == 1008


async def test_a_silent_session_is_closed_with_1008_but_not_one_that_speaks() -> None:
    omni = FakeOmni()
    gate = Gate(open=1)
    omni.before_chunk = gate
    async with session(omni, ApiConfig(ws_idle_timeout=0.1)) as socket:
        await say(socket, "input.text", text="One sentence. T")
        await until(lambda: omni.seen and omni.seen[0].chunks == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(until_event(socket, "error"), 0.3)
        gate.release()
        events, _ = await until_event(socket, "error")
        assert (events[-2]["type"], events[-1]["code"]) == ("audio.done", "timeout")
        assert await close_code(socket) == 1008


async def test_a_binary_frame_is_refused_with_1003() -> None:
    async with session(FakeOmni()) as socket:
        await socket.send(b"audio")
        assert (await next_event(socket))["type"] == "error"
        assert await close_code(socket) == 1003


async def test_too_large_messages_and_sessions_are_refused_with_1009() -> None:
    async with session(FakeOmni()) as socket:
        await say(socket, "input.text", text="x" * (128 * 1024))
        assert await close_code(socket) == 1009
    async with session(FakeOmni(), ApiConfig(max_input_chars=10)) as socket:
        await say(socket, "input.text", text="12345 6789 0")
        assert (await next_event(socket))["param"] == "text"
        assert await close_code(socket) == 1009


@pytest.mark.parametrize(("error", "code"), [(StageFailed("Broken."), 1011), (Overloaded("Full."), 1013)])
async def test_a_failed_stage_is_told_and_closes_the_session(error: Exception, code: int) -> None:
    omni = FakeOmni()
    omni.before_chunk = failing(error, after=1)
    async with session(omni) as socket:
        await say(socket, "input.text", text="One sentence. Two. Three")
        events, audio = await until_event(socket, "error")
        assert await close_code(socket) == code
    assert [event["type"] for event in events] == ["audio.start", "audio.done", "error"]
    assert events[1]["error"] == str(error)
    assert events[1]["total_bytes"] == len(audio) == 2 * CHUNK
    await until(lambda: all(seen.ended.is_set() for seen in omni.seen))


async def test_closing_the_socket_while_it_speaks_aborts_its_requests() -> None:
    omni = FakeOmni()
    omni.before_chunk = Gate(open=1)
    async with serve(create_app(omni)) as address:
        for number in range(20):
            async with connect(f"ws://{address}/v1/audio/speech/stream", proxy=None) as socket:
                await say(socket, "session.config", response_format="mp3")
                await say(socket, "input.text", text="Number one. Number two. Number three. ")
                await until(lambda n=number: len(omni.seen) >= 2 * n + 2 and omni.seen[2 * n + 1].chunks)
                if number % 2:
                    socket.transport.abort()
            await until(lambda n=number: all(seen.ended.is_set() for seen in omni.seen[: 2 * n + 2]))
    assert {seen.outcome for seen in omni.seen} == {"abort"}
    assert len(omni.seen) == 40


async def test_a_slow_reader_holds_a_bounded_amount_of_audio() -> None:
    omni = FakeOmni()
    omni.audio = lambda text: np.zeros(24000 * (200 if "long" in text else 1), np.float32)
    config = ApiConfig(ws_frame_window=4)
    async with (
        serve(create_app(omni, config)) as address,
        connect(f"ws://{address}/v1/audio/speech/stream", proxy=None, max_queue=1) as slow,
        connect(f"ws://{address}/v1/audio/speech/stream", proxy=None) as quick,
    ):
        for socket, text in ((slow, "A long one."), (quick, "A short one.")):
            await say(socket, "session.config", response_format="pcm", sample_rate=48000)
            await say(socket, "input.text", text=text)
            await say(socket, "input.flush")
        _, audio = await until_event(quick, "audio.done")
        assert len(audio) == 2 * 48000
        assert not omni.seen[0].ended.is_set()
        assert omni.seen[0].chunks < 800
        _, audio = await until_event(slow, "audio.done")
        assert len(audio) == 2 * 48000 * 200


async def test_sessions_do_not_disturb_each_other() -> None:
    omni = FakeOmni()

    async def fail_marked(seen: Seen) -> None:
        assert isinstance(seen.request, Speech)
        if "bad" in seen.request.input:
            raise StageFailed("Broken.")

    omni.before_chunk = fail_marked

    async def run(address: str, word: str) -> list[str]:
        async with connect(f"ws://{address}/v1/audio/speech/stream", proxy=None) as socket:
            await say(socket, "session.config", response_format="pcm")
            await say(socket, "input.text", text=f"This is {word}. And {word} again.")
            await say(socket, "input.done")
            events, _ = await until_event(socket, "error" if word == "bad" else "session.done")
            return [event["sentence_text"] for event in events if event["type"] == "audio.start"]

    async with serve(create_app(omni)) as address:
        spoken = await asyncio.gather(
            *(run(address, word) for word in ("good", "bad", "fine", "bad", "nice"))
        )
    assert spoken[0] == ["This is good.", "And good again."]
    assert spoken[2] == ["This is fine.", "And fine again."]
    assert spoken[4][1] == "And nice again."
