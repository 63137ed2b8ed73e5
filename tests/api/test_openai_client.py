from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from fake_omni import CHUNK, FakeOmni, Gate, failing, tone
from serving import decode, serve

from omni_async.api.app import create_app
from omni_async.api.audio_encoder import to_int16
from omni_async.api.config import ApiConfig
from omni_async.errors import Overloaded

TEXT = "Hello there, this is a text."


@asynccontextmanager
async def openai_client(omni: FakeOmni, key: str = "k") -> AsyncGenerator[openai.AsyncOpenAI]:
    async with (
        serve(create_app(omni, ApiConfig(api_keys=("k",)))) as address,
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=key, max_retries=0) as client,
    ):
        yield client


async def test_speech_create_gives_a_file(tmp_path: Path) -> None:
    async with openai_client(FakeOmni()) as client:
        answer = await client.audio.speech.create(
            model="tts-1", voice="alloy", input=TEXT, response_format="mp3", speed=1.0
        )
        answer.write_to_file(tmp_path / "speech.mp3")
    samples, rate = decode((tmp_path / "speech.mp3").read_bytes())
    assert rate == 24000
    assert len(samples) == len(tone(TEXT))


async def test_streaming_response_gives_audio_while_it_is_made() -> None:
    omni, gate = FakeOmni(), Gate(open=1)
    omni.before_chunk = gate
    async with (
        openai_client(omni) as client,
        client.audio.speech.with_streaming_response.create(
            model="tts-1", voice="heart", input=TEXT, response_format="pcm", extra_body={"stream": True}
        ) as answer,
    ):
        pieces = answer.iter_bytes(2 * CHUNK)
        first = await anext(pieces)
        gate.release()
        rest = b"".join([piece async for piece in pieces])
    assert first + rest == to_int16(tone(TEXT)).tobytes()


async def test_models_are_listed() -> None:
    async with openai_client(FakeOmni()) as client:
        assert "tts-1" in [model.id async for model in client.models.list()]


async def test_errors_become_the_clients_own_exceptions() -> None:
    omni = FakeOmni()
    async with openai_client(omni) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.audio.speech.create(model="tts-1", voice="nobody", input=TEXT)
        with pytest.raises(openai.NotFoundError):
            await client.audio.speech.create(model="tts-9", voice="heart", input=TEXT)
        omni.before_chunk = failing(Overloaded("Full.", retry_after=2))
        with pytest.raises(openai.InternalServerError) as full:
            await client.audio.speech.create(model="tts-1", voice="heart", input=TEXT)
    assert (bad.value.param, bad.value.code) == ("voice", "unknown_voice")
    assert full.value.status_code == 503
    assert full.value.response.headers["retry-after"] == "2"
    async with openai_client(omni, key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_a_client_that_retries_gets_through() -> None:
    omni = FakeOmni()
    error = Overloaded("Full.", retry_after=0.01)

    async def full_once(seen: object) -> None:
        if seen is omni.seen[0]:
            raise error

    omni.before_chunk = full_once
    async with openai_client(omni) as client:
        patient = client.with_options(max_retries=2)
        answer = await patient.audio.speech.create(model="tts-1", voice="heart", input=TEXT)
    assert decode(answer.content)[1] == 24000
    assert len(omni.seen) == 2
