from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
from fake_omni import ECHO, SPEECH, FakeOmni
from serving import DEADLINE, client_of, next_event, serve
from starlette.applications import Starlette
from starlette.routing import Mount
from websockets.asyncio.client import connect

from omni_async.api.app import create_app
from omni_async.api.config import ApiConfig

ROOT = Path(__file__).parents[2]
HEAVY = ("av", "soxr", "numpy", "torch", "prometheus_client")
BODY = {"input": "Hello."}


async def test_the_lifespan_starts_the_engine_and_closes_what_it_started() -> None:
    omni = FakeOmni()
    async with client_of(create_app(omni)) as client:
        assert omni.started
        assert (await client.get("/health")).status_code == 200
    assert (omni.starts, omni.closes, omni.started) == (1, 1, False)


async def test_an_engine_that_runs_already_is_neither_started_nor_closed() -> None:
    omni = FakeOmni()
    await omni.start()
    async with client_of(create_app(omni)) as client:
        assert (await client.post("/v1/audio/speech", json=BODY)).status_code == 200
    assert (omni.starts, omni.closes) == (1, 0)


async def test_mounted_into_another_app_everything_works_and_the_first_requests_start_it_once() -> None:
    omni = FakeOmni()
    host = Starlette(routes=[Mount("/tts", create_app(omni, ApiConfig(api_keys=("k",))))])
    headers = {"authorization": "Bearer k"}
    async with serve(host) as address:
        async with httpx.AsyncClient(
            base_url=f"http://{address}/tts", headers=headers, trust_env=False
        ) as client:
            answers = await asyncio.gather(*(client.post("/v1/audio/speech", json=BODY) for _ in range(5)))
            missing = await client.get("/v1/nothing")
        async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as bare:
            assert (await bare.get("/tts/health")).status_code == 200
            assert (await bare.get("/tts/v1/models")).status_code == 401
        async with connect(
            f"ws://{address}/tts/v1/audio/speech/stream", proxy=None, additional_headers=headers
        ) as socket:
            await socket.send('{"type": "ping"}')
            assert await next_event(socket) == {"type": "pong"}
    assert [answer.status_code for answer in answers] == [200] * 5
    assert omni.starts == 1
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "unknown_route"


async def test_an_engine_that_its_owner_closed_stays_closed() -> None:
    omni = FakeOmni()
    async with client_of(create_app(omni)) as client:
        await omni.close()
        answer = await client.post("/v1/audio/speech", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    assert omni.starts == 1


async def test_a_server_that_cannot_speak_names_the_model_and_has_no_echo_unless_configured() -> None:
    async with client_of(create_app(FakeOmni(ECHO))) as client:
        answer = await client.post("/v1/audio/speech", json=BODY)
        named = await client.post("/v1/audio/speech", json={**BODY, "model": "echo"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
    assert (named.status_code, named.json()["error"]["param"]) == (400, "model")
    async with client_of(create_app(FakeOmni(SPEECH))) as client:
        assert (await client.post("/v1/echo", json={"text": "a"})).status_code == 404
        assert "/v1/echo" not in (await client.get("/openapi.json")).json()["paths"]


def python(code: str) -> list[str]:
    """The words that `code` prints, run in a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


LOADED = f"print(*[name for name in {HEAVY} if name in sys.modules])"
SERVE = """
import sys
from omni_async.config import *
from omni_async.api.app import create_app
stage = StageConfig(stage_id=0, name="s", kind="s", final_output=True)
class Omni:
    started = False
    pipelines = (PipelineConfig(name="p", stages=(stage,), echo=True, speech=SPEECH),)
    def add_observer(self, observer): pass
create_app(Omni())
"""


def test_importing_the_app_loads_no_codec_and_no_model_library() -> None:
    assert python(f"import sys, omni_async.api.app; {LOADED}") == []


def test_a_server_without_speech_never_loads_codecs() -> None:
    assert python(SERVE.replace("SPEECH", "None") + LOADED) == ["prometheus_client"]


def test_a_server_with_speech_loads_codecs_before_the_first_request() -> None:
    speech = 'SpeechConfig(voices=("a",), default_voice="a")'
    assert python(SERVE.replace("SPEECH", speech) + LOADED) == ["av", "soxr", "numpy", "prometheus_client"]
