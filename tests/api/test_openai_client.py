from __future__ import annotations

import base64
import io
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import openai
import pytest
from fake_omni import CHUNK, FakeOmni, Gate, failing, tone
from PIL import Image as Pillow
from serving import decode, serve

from omni_async.api.app import create_app
from omni_async.api.audio_encoder import to_int16
from omni_async.api.config import ApiConfig
from omni_async.errors import Overloaded
from omni_async.image import Image

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


async def test_images_generate_gives_pictures() -> None:
    async with openai_client(FakeOmni()) as client:
        answer = await client.images.generate(
            model="gpt-image-1",
            prompt="cat",
            n=2,
            size="1024x1024",
            output_format="webp",
            background="opaque",
        )
    assert answer.data is not None and answer.usage is not None
    assert len(answer.data) == 2 and answer.size == "1024x1024" and answer.output_format == "webp"
    assert all(base64.b64decode(each.b64_json or "").startswith(b"RIFF") for each in answer.data)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


async def test_images_generate_streams_previews() -> None:
    async with openai_client(FakeOmni()) as client:
        stream = await client.images.generate(
            model="gpt-image-1", prompt="cat", stream=True, partial_images=2
        )
        events = [event async for event in stream]
    kinds = [*["image_generation.partial_image"] * 2, "image_generation.completed"]
    assert [event.type for event in events] == kinds
    assert [event.partial_image_index for event in events[:2]] == [0, 1]  # type: ignore[union-attr]


async def test_images_edit_changes_a_picture_under_a_mask() -> None:
    omni = FakeOmni()
    image, mask = (picture_file(channels) for channels in (3, 4))
    async with openai_client(omni) as client:
        answer = await client.images.edit(
            model="gpt-image-1", image=image, mask=mask, prompt="a hat", size="1024x1024"
        )
        several = await client.images.edit(model="gpt-image-1", image=[image, image], prompt="a hat")
    assert answer.data and several.data
    first, second = (seen.request for seen in omni.seen)
    assert isinstance(first, Image) and isinstance(second, Image)
    assert first.mask is not None and len(second.images) == 2


def picture_file(channels: int) -> tuple[str, bytes, str]:
    file = io.BytesIO()
    Pillow.fromarray(np.zeros((64, 64, channels), np.uint8)).save(file, "PNG")
    return ("picture.png", file.getvalue(), "image/png")


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
