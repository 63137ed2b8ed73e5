from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from fake_omni import FakeOmni, failing, tone
from serving import client_of, decode

from omni_async.api.app import create_app
from omni_async.api.audio_encoder import to_int16
from omni_async.errors import StageFailed

TEXT = "Hello there, this is a text."
BODY = {"input": TEXT, "stream_format": "sse"}


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def audio_of(events: list[dict[str, Any]]) -> bytes:
    return b"".join(base64.b64decode(e["audio"]) for e in events if e["type"] == "speech.audio.delta")


@pytest.mark.parametrize("fmt", ["pcm", "wav", "mp3", "opus"])
async def test_events_carry_the_same_bytes_as_the_stream(fmt: str) -> None:
    async with client_of(create_app(FakeOmni())) as client:
        events = events_of(await client.post("/v1/audio/speech", json={**BODY, "response_format": fmt}))
        body = {"input": TEXT, "response_format": fmt, "stream": True}
        stream = await client.post("/v1/audio/speech", json=body)
    assert [event["type"] for event in events[-2:]] == ["speech.audio.delta", "speech.audio.done"]
    assert len(events) > 3
    if fmt == "opus":  # an Ogg stream has a serial number of its own
        assert len(decode(audio_of(events))[0]) == len(decode(stream.content)[0])
    else:
        assert audio_of(events) == stream.content


async def test_usage_counts_characters_and_audio() -> None:
    async with client_of(create_app(FakeOmni())) as client:
        events = events_of(await client.post("/v1/audio/speech", json={**BODY, "response_format": "pcm"}))
    seconds = len(tone(TEXT)) / 24000
    assert audio_of(events) == to_int16(tone(TEXT)).tobytes()
    assert events[-1]["usage"] == {
        "input_tokens": len(TEXT),
        "output_tokens": int(seconds / 0.05) + 1,
        "total_tokens": len(TEXT) + int(seconds / 0.05) + 1,
        "audio_seconds": pytest.approx(seconds, abs=1e-6),
    }


async def test_a_failure_in_mid_stream_is_an_event_and_the_last_one() -> None:
    omni = FakeOmni()
    omni.before_chunk = failing(StageFailed("Gone.", stage="tone"), after=2)
    async with client_of(create_app(omni)) as client:
        answer = await client.post("/v1/audio/speech", json={**BODY, "response_format": "pcm"})
    events = events_of(answer)
    assert [event["type"] for event in events] == ["speech.audio.delta"] * 2 + ["speech.audio.error"]
    assert events[-1]["error"]["message"] == "Gone."
    assert events[-1]["error"]["code"] == "stage_failed"
    assert events[-1]["error"]["request_id"] == answer.headers["x-request-id"]
