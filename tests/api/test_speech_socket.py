from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
from fake_omni import CHUNK, FakeOmni, Gate, Seen, failing, tone
from serving import DEADLINE, decode, next_event, serve, until, until_event
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from omni_async.api.app import create_app
from omni_async.api.audio_encoder import to_int16
from omni_async.api.config import ApiConfig
from omni_async.api.media_plan import FORMATS
from omni_async.errors import Overloaded, StageFailed
from omni_async.speech import Speech


@asynccontextmanager
async def session(
    omni: FakeOmni, config: ApiConfig | None = None, **fields: Any
) -> AsyncGenerator[ClientConnection]:
    """A configured session of raw pcm, unless `fields` say otherwise."""
    async with (
        serve(create_app(omni, config)) as address,
        connect(f"ws://{address}/v1/audio/speech/stream", proxy=None) as socket,
    ):
        await say(socket, "session.config", **{"response_format": "pcm", **fields})
        created = await next_event(socket)
        assert created["type"] == "session.created", created
        yield socket


async def say(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def close_code(socket: ClientConnection) -> int:
    with suppress(ConnectionClosed):
        while True:
            await asyncio.wait_for(socket.recv(), DEADLINE)
    assert socket.close_code is not None
    return socket.close_code


def inputs(omni: FakeOmni) -> list[str]:
    return [seen.request.input for seen in omni.seen if isinstance(seen.request, Speech)]


async def test_a_session_speaks_sentence_by_sentence_and_ends_with_1000() -> None:
    omni = FakeOmni()
    async with session(omni, voice="deep") as socket:
        for piece in ("Mr. Smi", "th paid 3.5 d", "ollars. And", " left."):
            await say(socket, "input.text", text=piece)
        await say(socket, "input.done")
        first, audio = await until_event(socket, "audio.done")
        second, more = await until_event(socket, "audio.done")
        done = await next_event(socket)
        assert await close_code(socket) == 1000
    sentences = ["Mr. Smith paid 3.5 dollars.", "And left."]
    assert inputs(omni) == sentences
    assert first[0] == {
        "type": "audio.start",
        "sentence_index": 0,
        "sentence_text": sentences[0],
        "format": "pcm",
        "sample_rate": 24000,
    }
    assert first[1] == {"type": "audio.done", "sentence_index": 0, "total_bytes": len(audio), "error": None}
    assert [audio, more] == [to_int16(tone(sentence)).tobytes() for sentence in sentences]
    assert second[0]["sentence_index"] == 1
    assert done == {"type": "session.done", "total_sentences": 2}


async def test_the_created_event_tells_the_audio_that_will_come() -> None:
    async with (
        serve(create_app(FakeOmni())) as address,
        connect(f"ws://{address}/v1/audio/speech/stream", proxy=None) as socket,
    ):
        await say(socket, "session.config", response_format="opus", sample_rate=22050)
        created = await next_event(socket)
    assert (created["sample_rate"], created["format"]) == (48000, "opus")
    assert created["session_id"]


async def test_audio_flows_while_text_is_still_typed() -> None:
    omni = FakeOmni()
    async with session(omni) as socket:
        await say(socket, "input.text", text="First one. Second")
        events, audio = await until_event(socket, "audio.done")
        assert events[0]["sentence_text"] == "First one."
        assert audio
        await say(socket, "input.text", text=" one. Third")
        events, _ = await until_event(socket, "audio.done")
        assert events[0]["sentence_text"] == "Second one."


async def test_the_next_sentence_is_under_way_while_one_is_sent_but_not_the_one_after() -> None:
    omni, gate = FakeOmni(), Gate(open=1)
    omni.before_chunk = gate
    async with session(omni) as socket:
        await say(socket, "input.text", text="Number one. Number two. Number three. Number four. ")
        await until(lambda: len(omni.seen) == 2 and all(seen.chunks == 1 for seen in omni.seen))
        await say(socket, "ping")
        events, _ = await until_event(socket, "pong")
        assert [event["type"] for event in events] == ["audio.start", "pong"]
        assert len(omni.seen) == 2, "read-ahead is bounded"
        gate.release()
        await say(socket, "input.done")
        events, _ = await until_event(socket, "session.done")
    starts = [event["sentence_index"] for event in events if event["type"] == "audio.start"]
    assert starts == [1, 2, 3], "in order"


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("stream_audio", [True, False])
async def test_each_sentence_is_a_complete_file_of_its_format(fmt: str, stream_audio: bool) -> None:
    async with session(FakeOmni(), response_format=fmt, stream_audio=stream_audio) as socket:
        await say(socket, "input.text", text="This is number one. This is two.")
        await say(socket, "input.done")
        for sentence in ("This is number one.", "This is two."):
            events, audio = await until_event(socket, "audio.done")
            assert events[-1]["total_bytes"] == len(audio)
            assert events[-1]["error"] is None
            if fmt == "pcm":
                assert len(audio) == 2 * len(tone(sentence))
            else:
                samples, rate = decode(audio)
                assert len(samples) / rate == pytest.approx(len(tone(sentence)) / 24000, abs=2048 / 24000)


async def test_without_stream_audio_a_sentence_is_one_frame() -> None:
    async with session(FakeOmni(), response_format="wav", stream_audio=False) as socket:
        await say(socket, "input.text", text="This is one sentence.")
        await say(socket, "input.flush")
        frames: list[bytes] = []
        while True:
            message = await asyncio.wait_for(socket.recv(), DEADLINE)
            if isinstance(message, bytes):
                frames.append(message)
            elif json.loads(message)["type"] == "audio.done":
                break
    assert len(frames) == 1
    assert int.from_bytes(frames[0][4:8], "little") == len(frames[0]) - 8


async def test_several_utterances_share_a_session() -> None:
    async with session(FakeOmni()) as socket:
        for number in range(3):
            await say(socket, "input.text", text=f"Utterance {number}")
            await say(socket, "input.flush")
            events, audio = await until_event(socket, "audio.done")
            assert events[0]["sentence_index"] == number
            assert audio
        await say(socket, "input.done")
        assert (await next_event(socket))["total_sentences"] == 3


async def test_a_cancel_stops_at_once_and_the_session_stays() -> None:
    omni = FakeOmni()
    omni.before_chunk = Gate(open=1)
    async with session(omni) as socket:
        await say(socket, "input.text", text="Number one. Number two. Number three. ")
        await until(lambda: len(omni.seen) == 2 and all(seen.chunks for seen in omni.seen))
        await say(socket, "input.cancel")
        events, _ = await until_event(socket, "audio.done")
        assert events[-1] == {
            "type": "audio.done",
            "sentence_index": 0,
            "total_bytes": 2 * CHUNK,
            "error": "cancelled",
        }
        await until(lambda: all(seen.ended.is_set() for seen in omni.seen))
        assert [seen.outcome for seen in omni.seen] == ["abort", "abort"]
        omni.before_chunk = None
        await say(socket, "input.text", text="Another.")
        await say(socket, "input.done")
        events, audio = await until_event(socket, "session.done")
    assert events[0]["sentence_text"] == "Another."
    assert audio == to_int16(tone("Another.")).tobytes()
    assert len(inputs(omni)) == 3, "what waited is forgotten"


async def test_a_ping_is_answered_while_speaking() -> None:
    omni, gate = FakeOmni(), Gate(open=1)
    omni.before_chunk = gate
    async with session(omni) as socket:
        await say(socket, "input.text", text="A long sentence. B")
        await until(lambda: omni.seen and omni.seen[0].chunks == 1)
        await say(socket, "ping")
        events, _ = await until_event(socket, "pong")
        assert events[0]["type"] == "audio.start"
        assert not omni.seen[0].ended.is_set()
        gate.release()


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


async def test_clauses_and_whole_texts_are_spoken_as_configured() -> None:
    for granularity, expected in (
        ("clause", ["One,", "two;", "three."]),
        ("none", ["One, two; three. Four."]),
    ):
        omni = FakeOmni()
        async with session(omni, split_granularity=granularity) as socket:
            text = "One, two; three. Four." if granularity == "none" else "One, two; three."
            await say(socket, "input.text", text=text)
            await say(socket, "input.done")
            await until_event(socket, "session.done")
        assert inputs(omni) == expected


async def test_a_long_text_without_punctuation_is_spoken_whole() -> None:
    omni = FakeOmni()
    omni.audio = lambda text: np.zeros(100, np.float32)
    words = " ".join(f"word{number}" for number in range(3000))
    async with session(omni) as socket:
        await say(socket, "input.text", text=words)
        await say(socket, "input.done")
        events, _ = await until_event(socket, "session.done")
    assert " ".join(inputs(omni)) == words
    assert events[-1]["total_sentences"] > 20


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
