"""The built-in speech server, heard and measured through its real clients."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from openai import BadRequestError, OpenAI
from websockets.asyncio.client import connect

from tests.recogniser import HARVARD, word_error_rate
from tests.servers import Server, poll_until

TEN_SENTENCES = " ".join(HARVARD)
RATE = 24000


def speak(server: Server, text: str, **fields: Any) -> bytes:
    """The whole body of an answer."""
    body = {"input": text, "response_format": "pcm", "seed": 1, **fields}
    answer = httpx.post(f"{server.url}/v1/audio/speech", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.content


def as_float(pcm: bytes) -> NDArray[np.float32]:
    """16-bit little-endian PCM as floats in [-1, 1]."""
    return np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(32768)


def decoded_seconds(data: bytes) -> float:
    """The duration of an encoded file, by decoding it."""
    with av.open(io.BytesIO(data), "r") as container:
        stream = container.streams.audio[0]
        samples = sum(frame.samples for frame in container.decode(stream))
        return samples / stream.rate


async def speak_by_socket(server: Server, text: str, **config: Any) -> tuple[bytes, list[dict[str, Any]]]:
    """PCM and events of one session."""
    pcm = bytearray()
    events: list[dict[str, Any]] = []
    async with connect(f"{server.ws_url}/v1/audio/speech/stream", max_size=None) as ws:
        await ws.send(json.dumps({"type": "session.config", "response_format": "pcm", "seed": 1, **config}))
        for piece in re.findall(r".{1,7}", text):
            await ws.send(json.dumps({"type": "input.text", "text": piece}))
        await ws.send(json.dumps({"type": "input.done"}))
        async for message in ws:
            if isinstance(message, bytes):
                pcm += message
            else:
                events.append(json.loads(message))
                if events[-1]["type"] == "session.done":
                    break
    return bytes(pcm), events


def test_whole_audio_is_understood(speech_server: Server) -> None:
    pcm = as_float(speak(speech_server, TEN_SENTENCES))
    assert word_error_rate(TEN_SENTENCES, pcm, RATE) <= 0.15


def test_streamed_audio_is_understood_and_equals_whole_audio(speech_server: Server) -> None:
    streamed = speak(speech_server, TEN_SENTENCES, stream=True)
    assert streamed == speak(speech_server, TEN_SENTENCES)
    assert word_error_rate(TEN_SENTENCES, as_float(streamed), RATE) <= 0.15


async def test_websocket_audio_is_understood_sentence_by_sentence(speech_server: Server) -> None:
    pcm, events = await speak_by_socket(speech_server, TEN_SENTENCES)
    spoken = [event["sentence_text"].strip() for event in events if event["type"] == "audio.start"]
    assert spoken == HARVARD
    assert word_error_rate(TEN_SENTENCES, as_float(pcm), RATE) <= 0.15


def test_the_sampled_talker_is_understood_and_seeded(speech_server: Server) -> None:
    sampled = {"extra_params": {"temperature": 0.6}}
    one = speak(speech_server, TEN_SENTENCES, **sampled)
    assert one == speak(speech_server, TEN_SENTENCES, stream=True, **sampled)
    assert one != speak(speech_server, TEN_SENTENCES, **sampled, **{"seed": 2})
    assert one != speak(speech_server, TEN_SENTENCES)
    assert word_error_rate(TEN_SENTENCES, as_float(one), RATE) <= 0.15


def test_the_first_chunk_leaves_while_later_ones_are_not_yet_made(speech_server: Server) -> None:
    body = {"input": " ".join([TEN_SENTENCES] * 4), "response_format": "pcm", "stream": True}
    with httpx.stream("POST", f"{speech_server.url}/v1/audio/speech", json=body, timeout=60) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        ready = httpx.get(f"{speech_server.url}/health/ready").json()
        assert sum(stage["running"] for stage in ready["stages"]) >= 1
        rest = sum(map(len, pieces))
    assert rest > 20 * 2 * RATE


def test_sixteen_different_requests_at_once_each_equal_their_solo_run(speech_server: Server) -> None:
    voices = ["heart", "onyx", "nova", "echo"]
    requests: list[dict[str, Any]] = [
        {
            "text": " ".join(HARVARD[i % 7 : i % 7 + 1 + i % 3]),
            "voice": voices[i % 4],
            "seed": i,
            "speed": 1.0 + 0.1 * (i % 3),
            "stream": bool(i % 2),
            "extra_params": {"temperature": 0.0 if i % 4 else 0.7},
        }
        for i in range(16)
    ]
    solo = [speak(speech_server, **request) for request in requests]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda request: speak(speech_server, **request), requests))
    assert [a == b for a, b in zip(solo, together, strict=True)] == [True] * 16
    assert len(set(solo)) == 16


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_all_formats_decode_to_the_same_duration(speech_server: Server, stream: bool) -> None:
    seconds = len(speak(speech_server, HARVARD[0])) / 2 / RATE
    for kind in ("wav", "flac", "mp3", "aac", "opus"):
        data = speak(speech_server, HARVARD[0], response_format=kind, stream=stream)
        # One frame of the longest codec (AAC, 1024 samples) and its encoder's delay.
        assert decoded_seconds(data) == pytest.approx(seconds, abs=0.1), kind


def test_speed_changes_the_duration_while_streaming_too(speech_server: Server) -> None:
    normal = len(speak(speech_server, HARVARD[0]))
    for speed in (0.5, 2.0):
        for stream in (False, True):
            length = len(speak(speech_server, HARVARD[0], speed=speed, stream=stream))
            assert length == pytest.approx(normal / speed, rel=0.15)


def test_text_without_punctuation_is_spoken_whole_and_in_order(speech_server: Server) -> None:
    words = " ".join(sentence.rstrip(".") for sentence in HARVARD) + " "
    pcm = as_float(speak(speech_server, words * 2, stream=True))
    assert word_error_rate(words * 2, pcm, RATE) <= 0.2


@pytest.mark.parametrize("text", ["", "   ", "🙂🙂", "...!?", "\n\t"])
async def test_text_with_nothing_to_speak_is_refused_everywhere(speech_server: Server, text: str) -> None:
    async with httpx.AsyncClient(base_url=speech_server.url, timeout=30) as client:
        for stream in (False, True):
            answer = await client.post("/v1/audio/speech", json={"input": text, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
        items = {"items": [{"input": text}, {"input": "Fine."}]}
        batch = await client.post("/v1/audio/speech/batch", json=items)
    assert [item["error"] is None for item in batch.json()["results"]] == [False, True]
    if text.strip():
        _, events = await speak_by_socket(speech_server, text)
        assert [event["type"] for event in events if event["type"] in ("error", "audio.start")] == ["error"]


def test_two_hundred_listeners_who_leave_change_nothing(speech_server: Server) -> None:
    def resident() -> int:
        return sum(p.memory_info().rss for p in speech_server.workers())

    def idle() -> bool:
        ready = httpx.get(f"{speech_server.url}/health/ready").json()
        return all(stage["running"] == stage["waiting"] == 0 for stage in ready["stages"])

    text = " ".join([TEN_SENTENCES] * 3)
    body = json.dumps({"input": text, "response_format": "pcm", "stream": True}).encode()
    head = (
        b"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )

    def leave(i: int) -> None:
        with socket.create_connection(("127.0.0.1", speech_server.port), timeout=30) as sock:
            sock.sendall(head + body)
            sock.recv(1 if i % 2 else 100_000)

    wanted = speak(speech_server, HARVARD[0])
    list(map(leave, range(20)))
    poll_until(idle, 30)
    before, handles = resident(), speech_server.open_files()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, range(200)))
    poll_until(idle, 60)
    assert speak(speech_server, HARVARD[0]) == wanted
    poll_until(lambda: speech_server.open_files() <= handles + 2)
    assert resident() < before * 1.1 + 20e6


def test_the_openai_client_hears_speech(speech_server: Server) -> None:
    client = OpenAI(base_url=f"{speech_server.url}/v1", api_key="unused")
    speech = client.audio.speech.create(model="tts-1", voice="alloy", input=HARVARD[0], response_format="mp3")
    assert decoded_seconds(speech.content) > 1.5
    with client.audio.speech.with_streaming_response.create(
        model="gpt-4o-mini-tts", voice="nova", input=HARVARD[1], response_format="wav"
    ) as response:
        assert decoded_seconds(b"".join(response.iter_bytes())) > 1.5
    with pytest.raises(BadRequestError, match="voice"):
        client.audio.speech.create(model="tts-1", voice="nobody", input="Hi.")


async def test_other_requests_are_answered_while_one_is_long(speech_server: Server) -> None:
    async with httpx.AsyncClient(base_url=speech_server.url, timeout=120) as client:
        long_text = " ".join([TEN_SENTENCES] * 20)
        long = asyncio.create_task(client.post("/v1/audio/speech", json={"input": long_text}))
        short = await client.post("/v1/audio/speech", json={"input": "Quick.", "stream": True})
        assert short.status_code == 200
        assert not long.done()
        assert (await long).status_code == 200
