"""The picture server through its real clients: what is drawn is recognised, previews come early, a client
that leaves frees its slot, and folders of other models are served."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from openai import OpenAI
from PIL import Image as Pillow

from omni_async import AsyncOmni, AudioChunk, Image, ImageChunk, Progress, ServerConfig, Sound, VideoChunk
from tests.pictor_things import NAMES, nearest
from tests.servers import Server, poll_until, serve
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")

IN_THREADS = ServerConfig(single_process=True)


def pixels_of(b64: str) -> NDArray[np.uint8]:
    return np.asarray(Pillow.open(io.BytesIO(base64.b64decode(b64))))


async def draw(client: httpx.AsyncClient, prompt: str, **fields: Any) -> list[NDArray[np.uint8]]:
    answer = await client.post("/v1/images/generations", json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return [pixels_of(each["b64_json"]) for each in answer.json()["data"]]


@pytest.fixture
async def client(speech_server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=speech_server.url, timeout=60) as client:
        yield client


async def test_every_size_shows_the_thing_that_was_asked_for(client: httpx.AsyncClient) -> None:
    for size in ("128x128", "256x256", "512x512"):
        (picture,) = await draw(client, "red apple", size=size)
        assert f"{picture.shape[1]}x{picture.shape[0]}" == size
        assert NAMES[nearest([picture])[0]] == "red apple"


async def test_pictures_drawn_at_once_are_each_what_they_are_alone(client: httpx.AsyncClient) -> None:
    wanted = [("rocket", 8, 2.5), ("pizza", 12, 2.5), ("frog", 4, 3.0), ("snowman", 8, 2.5)] * 2
    calls = [
        draw(client, prompt, num_inference_steps=steps, guidance_scale=scale, seed=seed, n=2)
        for seed, (prompt, steps, scale) in enumerate(wanted)
    ]
    together = await asyncio.gather(*calls)
    for seed, (prompt, steps, scale) in enumerate(wanted):
        alone = await draw(client, prompt, num_inference_steps=steps, guidance_scale=scale, seed=seed, n=2)
        for one, other in zip(together[seed], alone, strict=True):
            assert np.abs(one.astype(int) - other).max() <= 1
            assert NAMES[nearest([one])[0]] == prompt


async def test_previews_arrive_while_the_picture_is_made(client: httpx.AsyncClient) -> None:
    body = {"prompt": "rocket", "num_inference_steps": 60, "stream": True, "partial_images": 2, "seed": 1}
    stamps: list[tuple[str, float]] = []
    async with client.stream("POST", "/v1/images/generations", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                stamps.append((line.removeprefix("event: image_generation."), time.monotonic()))
    assert [name for name, _ in stamps] == ["partial_image", "partial_image", "completed"]
    first, second, last = (stamp for _, stamp in stamps)
    # Twenty steps lie between each two of them; one burst at the end would have them together.
    assert second - first > 0.1 and last - second > 0.1


def running(server: Server) -> int:
    stages = httpx.get(f"{server.url}/health/ready").json()["stages"]
    return sum(stage["running"] + stage["waiting"] for stage in stages if stage["pipeline"] == "pictor")


async def test_a_client_that_leaves_frees_its_slots_at_the_next_step(
    client: httpx.AsyncClient, speech_server: Server
) -> None:
    asking = asyncio.create_task(draw(client, "rocket", num_inference_steps=200, n=8))
    await asyncio.to_thread(poll_until, lambda: running(speech_server) == 8)
    began = time.monotonic()
    asking.cancel()
    await asyncio.wait([asking])
    await asyncio.to_thread(poll_until, lambda: running(speech_server) == 0)
    assert time.monotonic() - began < 5, "200 steps of 8 pictures take a minute"
    assert NAMES[nearest(await draw(client, "pizza"))[0]] == "pizza"


def test_the_openai_client_draws_and_changes_pictures(speech_server: Server) -> None:
    with OpenAI(base_url=f"{speech_server.url}/v1", api_key="none") as client:
        made = client.images.generate(model="gpt-image-1", prompt="red apple", size="256x256")
        assert made.data is not None and made.data[0].b64_json is not None
        data = base64.b64decode(made.data[0].b64_json)
        edited = client.images.edit(
            model="gpt-image-1", image=("a.png", data), prompt="green apple", extra_body={"strength": 0.9}
        )
    assert edited.data is not None and edited.data[0].b64_json is not None
    assert NAMES[nearest([pixels_of(edited.data[0].b64_json)])[0]] == "green apple"


def test_a_folder_is_served_deterministic_bit_for_bit_as_its_own_pipeline_draws() -> None:
    folder = tiny_folder("flux")
    body = {"prompt": "a cat", "size": "64x96", "num_inference_steps": 3, "guidance_scale": 2.0, "seed": 5}
    with serve(str(folder), "--deterministic") as server:
        answers = [httpx.post(f"{server.url}/v1/images/generations", json=body, timeout=60) for _ in "ab"]
        refused = httpx.post(f"{server.url}/v1/images/generations", json={**body, "size": "65x96"})
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
    params = {"num_inference_steps": 3, "guidance_scale": 2.0, "output_type": "np"}
    stock = stock_pipeline("flux")(
        "a cat", width=64, height=96, generator=torch.Generator().manual_seed(5), **params
    ).images[0]
    for answer in answers:
        (each,) = answer.json()["data"]
        assert np.array_equal(pixels_of(each["b64_json"]), (stock * 255).round().astype("uint8"))
    assert refused.status_code == 400 and "64x96" in refused.json()["error"]["message"]
    assert models[0]["id"] == "flux"


async def test_films_come_out_of_the_python_interface() -> None:
    async with AsyncOmni(model=str(tiny_folder("wan")), server=IN_THREADS) as omni:
        request = Image(prompt="rain", size="64x64", num_frames=5, num_inference_steps=2, progress=True)
        chunks = [chunk async for chunk in omni.generate(request)]
    assert [chunk.step for chunk in chunks if isinstance(chunk, Progress)] == [1, 2]
    assert isinstance(chunks[-1], VideoChunk)
    assert chunks[-1].frames.shape == (5, 64, 64, 3) and chunks[-1].frames.dtype == np.uint8


async def test_sound_comes_out_of_the_python_interface_at_the_models_own_rate() -> None:
    async with AsyncOmni(model=str(tiny_folder("stable_audio")), server=IN_THREADS) as omni:
        request = Sound(prompt="a drum", seconds=8.0, num_inference_steps=3, seed=1)
        chunks = [chunk async for chunk in omni.generate(request)]
    (chunk,) = chunks
    assert isinstance(chunk, AudioChunk)
    assert chunk.pcm.shape == (32, 2) and chunk.sample_rate == 4 and chunk.duration == 8.0


async def test_a_pipeline_without_an_adapter_is_served() -> None:
    async with AsyncOmni(model=str(tiny_folder("pixart_sigma")), server=IN_THREADS) as omni:
        request = Image(prompt="a cat", size="64x64", num_inference_steps=2, seed=0)
        chunks = [chunk async for chunk in omni.generate(request)]
    assert isinstance(chunks[-1], ImageChunk)
    assert chunks[-1].pixels.shape == (64, 64, 3) and chunks[-1].seed == 0


def test_a_setting_that_the_family_cannot_have_ends_the_start_with_a_sentence() -> None:
    overrides = json.dumps({"0": {"engine_extras": {"cache_backend": "first_block"}}})
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "omni_async",
            "serve",
            "pictor",
            "--stage-overrides",
            overrides,
            "--port",
            "0",
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode != 0
    assert "SD3Transformer2DModel has no caches" in done.stderr
