from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from fake_omni import CHUNK, FakeOmni, Gate, tone
from serving import DEADLINE, decode, next_event, serve, until, until_event
from socket_talk import close_code, inputs, say, session
from websockets.asyncio.client import connect

from omni_async.api.app import create_app
from omni_async.api.audio_encoder import to_int16
from omni_async.api.media_plan import FORMATS


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
