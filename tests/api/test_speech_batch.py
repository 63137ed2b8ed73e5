from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from fake_omni import FakeOmni, Gate, Seen, tone
from serving import client_of, decode, until

from omni_async.api.app import create_app
from omni_async.api.audio_encoder import to_int16
from omni_async.api.config import ApiConfig
from omni_async.errors import Overloaded, StageFailed
from omni_async.speech import Speech

URL = "/v1/audio/speech/batch"


def texts(number: int) -> list[dict[str, Any]]:
    return [{"input": f"Text {index}."} for index in range(number)]


async def test_results_come_in_order_with_the_items_own_formats() -> None:
    omni = FakeOmni()
    items = texts(5)
    items[1]["response_format"] = "mp3"
    items[2]["voice"] = None
    async with client_of(create_app(omni)) as client:
        body = {"items": items, "response_format": "pcm", "voice": "Deep"}
        answer = (await client.post(URL, json=body)).json()
    assert (answer["total"], answer["succeeded"], answer["failed"]) == (5, 5, 0)
    assert [result["index"] for result in answer["results"]] == [0, 1, 2, 3, 4]
    assert [result["media_type"] for result in answer["results"]][:2] == [
        "audio/pcm;rate=24000;channels=1",
        "audio/mpeg",
    ]
    audio = [base64.b64decode(result["audio_data"]) for result in answer["results"]]
    assert audio[4] == to_int16(tone("Text 4.")).tobytes()
    assert len(decode(audio[1])[0]) == len(tone("Text 1."))
    assert {s.request.voice for s in omni.seen if isinstance(s.request, Speech)} == {"Deep"}


async def test_one_bad_item_fails_alone() -> None:
    omni = FakeOmni()
    bad: list[Any] = [
        {"input": "😀"},
        {"input": "a", "speed": 9},
        {"input": "a", "colour": 1},
        {},
        "text",
        {"input": "a", "model": "other"},
        {"input": "a", "stream": True},
        {"input": "x" * 300},
    ]
    async with client_of(create_app(omni, ApiConfig(max_input_chars=200))) as client:
        answer = await client.post(URL, json={"items": [*bad, {"input": "Good."}]})
    results = answer.json()["results"]
    assert answer.status_code == 200
    assert (answer.json()["succeeded"], answer.json()["failed"]) == (1, 8)
    assert [result["status"] for result in results] == ["error"] * 8 + ["success"]
    params = [result["error"]["param"] for result in results[:8]]
    assert params == ["input", "speed", "colour", "input", None, "model", "stream", "input"]
    assert all(result["audio_data"] is None for result in results[:8])
    assert len(omni.seen) == 1


async def test_a_stage_failure_or_a_full_queue_fails_its_item_alone() -> None:
    omni = FakeOmni()

    async def fail_some(seen: Seen) -> None:
        assert isinstance(seen.request, Speech)
        if "1" in seen.request.input:
            raise StageFailed("Broken.")
        if "2" in seen.request.input:
            raise Overloaded("Full.")

    omni.before_chunk = fail_some
    async with client_of(create_app(omni)) as client:
        results = (await client.post(URL, json={"items": texts(4)})).json()["results"]
    assert [result["status"] for result in results] == ["success", "error", "error", "success"]
    assert [r["error"] and r["error"]["code"] for r in results] == [None, "stage_failed", "overloaded", None]


async def test_items_run_at_the_same_time() -> None:
    omni, gate = FakeOmni(), Gate()
    omni.before_chunk = gate
    async with client_of(create_app(omni)) as client:
        asking = asyncio.create_task(client.post(URL, json={"items": texts(32)}))
        await until(lambda: len(omni.seen) == 32)
        gate.release()
        assert (await asking).json()["succeeded"] == 32


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "items"),
        ({"items": []}, "items"),
        ({"items": texts(33)}, "items"),
        ({"items": "a"}, "items"),
        ({"items": texts(1), "speed": 7}, "speed"),
        ({"items": texts(1), "input": "a"}, "input"),
        ({"items": texts(1), "stream": True}, "stream"),
    ],
)
async def test_a_wrong_batch_is_refused_as_a_whole(body: dict[str, Any], param: str) -> None:
    omni = FakeOmni()
    async with client_of(create_app(omni)) as client:
        answer = await client.post(URL, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert omni.seen == []


async def test_a_disconnect_cancels_every_item() -> None:
    omni = FakeOmni()
    omni.before_chunk = Gate(open=1)
    async with client_of(create_app(omni)) as client:
        asking = asyncio.create_task(client.post(URL, json={"items": texts(6)}))
        await until(lambda: len(omni.seen) == 6 and all(seen.chunks for seen in omni.seen))
        asking.cancel()
        await asyncio.wait({asking})
        await until(lambda: all(seen.ended.is_set() for seen in omni.seen))
    assert {seen.outcome for seen in omni.seen} == {"abort"}
