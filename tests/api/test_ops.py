from __future__ import annotations

import re

from fake_omni import FakeOmni, failing
from openapi_spec_validator import validate
from serving import client_of
from starlette.routing import Route, WebSocketRoute

from omni_async.api.app import create_app
from omni_async.api.openapi import openapi_document
from omni_async.api.ops import installed_version
from omni_async.errors import StageFailed


async def test_models_lists_pipelines_and_their_aliases() -> None:
    async with client_of(create_app(FakeOmni())) as client:
        answer = (await client.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [(card["id"], card["root"]) for card in answer["data"]] == [
        ("tone-tts", "tone-tts"),
        ("tts-1", "tone-tts"),
        ("echo", "echo"),
        ("patch", "patch"),
        ("gpt-image-1", "patch"),
    ]
    assert all(card["object"] == "model" and card["created"] > 0 for card in answer["data"])


async def test_readiness_tells_the_state_of_each_stage() -> None:
    omni = FakeOmni()
    async with client_of(create_app(omni)) as client:
        ready = await client.get("/health/ready")
        omni.ready = False
        unready = await client.get("/health/ready")
        alive = await client.get("/health")
    assert (ready.status_code, unready.status_code, alive.status_code) == (200, 503, 200)
    assert unready.json()["ready"] is False
    assert alive.json() == {"status": "ok"}
    stage = unready.json()["stages"][0]
    assert (stage["stage"], stage["state"], stage["waiting"], stage["replicas_up"]) == ("tone", "down", 4, 0)
    assert stage["replicas"][0]["last_step_age"] == 0.0


async def test_version_is_told() -> None:
    async with client_of(create_app(FakeOmni())) as client:
        assert (await client.get("/version")).json() == {"version": installed_version()}
    assert re.match(r"\d+\.\d+", installed_version())


async def test_metrics_count_requests_by_reason_and_read_the_stages() -> None:
    omni = FakeOmni()
    async with client_of(create_app(omni)) as client:
        await client.post("/v1/audio/speech", json={"input": "Hello.", "stream": True})
        await client.post("/v1/audio/speech", json={"input": "Hello."})
        omni.before_chunk = failing(StageFailed("x"))
        await client.post("/v1/audio/speech", json={"input": "Hello."})
        answer = await client.get("/metrics")
    lines = answer.text.splitlines()
    assert answer.headers["content-type"].startswith("text/plain; version=")
    for line in (
        'omni_requests_finished_total{model="tone-tts",reason="stop"} 2.0',
        'omni_requests_finished_total{model="tone-tts",reason="failed"} 1.0',
        'omni_request_seconds_count{model="tone-tts"} 3.0',
        'omni_queue_seconds_count{model="tone-tts"} 3.0',
        'omni_time_to_first_audio_seconds_count{model="tone-tts"} 2.0',
        'omni_real_time_factor_count{model="tone-tts"} 2.0',
        'omni_audio_seconds_total{model="tone-tts"} 1.0',
        'omni_underrun_seconds_total{model="tone-tts"} 0.0',
        'omni_streams_total{model="tone-tts"} 1.0',
        'omni_gapless_streams_total{model="tone-tts"} 1.0',
        'omni_requests_running{model="tone-tts",stage="tone"} 0.0',
        'omni_requests_waiting{model="tone-tts",stage="tone"} 4.0',
        'omni_transfer_bytes_total{model="tone-tts",stage="tone"} 99.0',
        'omni_batch_size{model="tone-tts",replica="tone/0",stage="tone"} 1.5',
        'omni_restarts_total{model="tone-tts",replica="tone/0",stage="tone"} 2.0',
        "omni_ready 1.0",
    ):
        assert line in lines, line


async def test_voices_are_listed_and_cannot_be_uploaded_or_deleted() -> None:
    async with client_of(create_app(FakeOmni())) as client:
        listed = await client.get("/v1/audio/voices")
        files = {"audio_sample": ("a.wav", b"RIFF" * 1000, "audio/wav")}
        upload = await client.post("/v1/audio/voices", files=files, data={"name": "me", "consent": "yes"})
        built_in = await client.delete("/v1/audio/voices/HEART")
        unknown = await client.delete("/v1/audio/voices/nobody")
    assert listed.json() == {"voices": ["heart", "Deep"], "uploaded_voices": []}
    assert (upload.status_code, upload.json()["error"]["param"]) == (400, "audio_sample")
    assert "no voice cloning" in upload.json()["error"]["message"]
    assert (built_in.status_code, unknown.status_code) == (403, 404)


async def test_openapi_describes_exactly_the_routes_there_are() -> None:
    app = create_app(FakeOmni())
    async with client_of(app) as client:
        document = (await client.get("/openapi.json")).json()
    assert document == openapi_document(has_echo=True)
    described = {(path, method) for path, operations in document["paths"].items() for method in operations}
    served = {(r.path, "get") for r in app.routes if isinstance(r, WebSocketRoute)}
    served |= {
        (route.path, method.lower())
        for route in app.routes
        if isinstance(route, Route)
        for method in (route.methods or set[str]()) - {"HEAD"}
    }
    assert described == served


async def test_openapi_is_valid_and_names_every_field() -> None:
    document = openapi_document(has_echo=True)
    validate(document)
    fields = document["components"]["schemas"]["SpeechBody"]["properties"]
    assert {"input", "voice", "speed", "stream", "stream_format", "sample_rate", "response_format"} <= set(
        fields
    )
    assert "gapless" not in fields
    assert document["components"]["schemas"]["SpeechBody"]["additionalProperties"] is False


async def test_echo_comes_back_whole_or_in_chunks() -> None:
    omni = FakeOmni()
    async with client_of(create_app(omni)) as client:
        whole = await client.post("/v1/echo", json={"text": "abcdef", "chunks": 3})
        empty = await client.post("/v1/echo", json={"text": ""})
        async with client.stream("POST", "/v1/echo", json={"text": "äbc", "stream": True}) as answer:
            streamed = "".join([part async for part in answer.aiter_text()])
        wrong = await client.post("/v1/echo", json={"text": "a", "chunks": 0})
        other = await client.post("/v1/echo", json={"text": "a", "model": "tts-1"})
    assert whole.json() == {"text": "abcdef"}
    assert empty.json() == {"text": ""}
    assert streamed == "äbc"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "chunks")
    assert (other.status_code, other.json()["error"]["param"]) == (400, "model")
    assert omni.seen[0].chunks == 3
