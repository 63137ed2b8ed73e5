from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import serving
from fake_omni import ECHO, SPEECH, FakeOmni, Gate, failing, patch
from numpy.typing import NDArray
from openai.types import (
    ImageEditCompletedEvent,
    ImageEditPartialImageEvent,
    ImageGenCompletedEvent,
    ImageGenPartialImageEvent,
    ImagesResponse,
)
from PIL import Image as Pillow
from serving import until

from omni_async.api import image_codec
from omni_async.api.app import create_app
from omni_async.api.config import ApiConfig
from omni_async.errors import Overloaded, StageFailed
from omni_async.image import Image

URL = "/v1/images/generations"
EDITS = "/v1/images/edits"


def client_of(
    omni: FakeOmni, config: ApiConfig | None = None
) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return serving.client_of(create_app(omni, config))


def pixels_of(b64: str) -> NDArray[np.uint8]:
    return np.asarray(Pillow.open(io.BytesIO(base64.b64decode(b64))))


def png(pixels: NDArray[Any], kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


GREY = np.full((64, 64, 3), 90, np.uint8)


async def test_n_pictures_have_the_seeds_from_the_first_on_and_the_size_asked_for() -> None:
    async with client_of(FakeOmni()) as client:
        answer = await client.post(URL, json={"prompt": "cat", "n": 3, "seed": 0, "size": "96x64"})
    body = answer.json()
    assert answer.status_code == 200
    assert [each["seed"] for each in body["data"]] == [0, 1, 2]
    assert body["size"] == "96x64" and body["output_format"] == "png"
    for seed, each in enumerate(body["data"]):
        assert np.array_equal(pixels_of(each["b64_json"]), patch("cat", seed, 96, 64))
    assert body["usage"]["output_tokens"] == 3 * 6 * 4
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + body["usage"]["output_tokens"]


async def test_without_a_seed_each_answer_has_new_ones_that_follow_each_other() -> None:
    async with client_of(FakeOmni()) as client:
        seeds = [
            [each["seed"] for each in (await client.post(URL, json={"prompt": "x", "n": 2})).json()["data"]]
            for _ in range(2)
        ]
    assert seeds[0] != seeds[1]
    assert all(second == first + 1 for first, second in seeds)


@pytest.mark.parametrize(
    ("kind", "magic"), [("png", b"\x89PNG"), ("jpeg", b"\xff\xd8"), ("jpg", b"\xff\xd8"), ("webp", b"RIFF")]
)
async def test_bytes_are_of_the_format_asked_for(kind: str, magic: bytes) -> None:
    async with client_of(FakeOmni()) as client:
        body = (await client.post(URL, json={"prompt": "cat", "output_format": kind})).json()
    assert base64.b64decode(body["data"][0]["b64_json"]).startswith(magic)
    assert body["output_format"] == kind.replace("jpg", "jpeg")


async def test_compression_makes_files_smaller() -> None:
    async with client_of(FakeOmni()) as client:
        sizes = [
            len((await client.post(URL, json={"prompt": "cat", "output_format": "jpeg", **more})).content)
            for more in ({"output_compression": 5}, {"output_compression": 100})
        ]
    assert sizes[0] < sizes[1]


async def test_a_transparent_picture_lies_on_white_in_a_jpeg() -> None:
    async with client_of(FakeOmni()) as client:
        bodies = [
            (await client.post(URL, json={"prompt": "glass", "output_format": kind})).json()
            for kind in ("jpeg", "png")
        ]
    opaque, clear = (pixels_of(body["data"][0]["b64_json"]) for body in bodies)
    assert [body["background"] for body in bodies] == ["opaque", "transparent"]
    assert opaque.shape == (64, 64, 3) and opaque.min() > 250
    assert clear.shape == (64, 64, 4) and clear[..., 3].max() == 0


async def test_an_opaque_background_is_white_in_every_format() -> None:
    body = {"prompt": "glass", "background": "opaque", "output_format": "png"}
    async with client_of(FakeOmni()) as client:
        answer = (await client.post(URL, json=body)).json()
    assert answer["background"] == "opaque"
    pixels = pixels_of(answer["data"][0]["b64_json"])
    assert pixels.shape == (64, 64, 3) and pixels.min() == 255


async def test_a_picture_is_encoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = threading.Event(), threading.Event()

    def slow(*given: Any, **options: Any) -> bytes:
        begun.set()
        assert released.wait(serving.DEADLINE)
        return b"picture"

    monkeypatch.setattr(image_codec, "write_picture", slow)
    async with client_of(FakeOmni()) as client:
        asking = asyncio.create_task(client.post(URL, json={"prompt": "cat"}))
        try:
            await until(begun.is_set)
            assert (await client.get("/health")).status_code == 200 and not asking.done()
        finally:
            released.set()
        answer = await asking
    assert base64.b64decode(answer.json()["data"][0]["b64_json"]) == b"picture"


async def test_openais_own_defaults_are_taken() -> None:
    body = {"prompt": "cat", "quality": "auto", "moderation": "auto", "background": "auto", "size": "auto"}
    async with client_of(FakeOmni()) as client:
        assert (await client.post(URL, json=body)).status_code == 200


async def test_an_enlarged_picture_says_what_was_drawn() -> None:
    async with client_of(FakeOmni()) as client:
        body = (await client.post(URL, json={"prompt": "cat", "size": "1024x1024"})).json()
    assert body["size"] == "1024x1024"
    assert body["data"][0]["upscaled_from"] == "512x512"


SIZES = [
    ("65x64", "64x64"),
    ("8x8", "64x64"),
    ("10000x10000", "512x512"),
    ("0x0", "64x64"),
    ("513x100", "512x96"),
    ("512x512", "320x320"),
]


@pytest.mark.parametrize(("size", "nearest"), SIZES)
async def test_another_size_is_refused_with_the_nearest_before_any_stage_is_asked(
    size: str, nearest: str
) -> None:
    omni, limit = FakeOmni(), ApiConfig(max_generated_image_size=320 * 320) if size == "512x512" else None
    async with client_of(omni, limit) as client:
        answer = await client.post(URL, json={"prompt": "cat", "size": size})
        again = await client.post(URL, json={"prompt": "cat", "size": nearest})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "size"
    assert answer.json()["error"]["message"].endswith(f"{nearest}.")
    assert again.status_code == 200 and again.json()["size"] == nearest
    assert len(omni.seen) == 1


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": " \n"}, "prompt"),
    ({"prompt": 3}, "prompt"),
    ({"prompt": "x" * 60}, "prompt"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": 11}, "n"),
    ({"prompt": "x", "size": "big"}, "size"),
    ({"prompt": "x", "num_inference_steps": 0}, "num_inference_steps"),
    ({"prompt": "x", "num_inference_steps": 201}, "num_inference_steps"),
    ({"prompt": "x", "guidance_scale": 20.5}, "guidance_scale"),
    ({"prompt": "x", "guidance_scale": "much"}, "guidance_scale"),
    ({"prompt": "x", "true_cfg_scale": 4.0}, "true_cfg_scale"),
    ({"prompt": "x", "seed": -1}, "seed"),
    ({"prompt": "x", "response_format": "url"}, "response_format"),
    ({"prompt": "x", "output_format": "gif"}, "output_format"),
    ({"prompt": "x", "output_compression": 50}, "output_compression"),
    ({"prompt": "x", "output_format": "webp", "output_compression": 101}, "output_compression"),
    ({"prompt": "x", "background": "transparent"}, "background"),
    ({"prompt": "x", "background": "blue"}, "background"),
    ({"prompt": "x", "layers": 3}, "layers"),
    ({"prompt": "x", "partial_images": 2}, "partial_images"),
    ({"prompt": "x", "stream": True, "partial_images": 4}, "partial_images"),
    ({"prompt": "x", "strength": 0.5}, "strength"),
    ({"prompt": "x", "lora": {"path": "a"}}, "lora.path"),
    ({"prompt": "x", "lora": {"scale": 1}}, "lora.path"),
    ({"prompt": "x", "quality": "high"}, "quality"),
    ({"prompt": "x", "moderation": "low"}, "moderation"),
    ({"prompt": "x", "style": "vivid"}, "style"),
    ({"prompt": "x", "seed": 2**63 - 1, "n": 2}, "seed"),
    ({"prompt": "x", "user": "me"}, "user"),
    ({"prompt": "x", "model": "tone-tts"}, "model"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_a_wrong_request_is_refused_by_the_name_of_its_field(body: dict[str, Any], param: str) -> None:
    omni = FakeOmni()
    async with client_of(omni, ApiConfig(max_input_chars=50)) as client:
        answer = await client.post(URL, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not omni.seen


async def test_an_unknown_model_is_not_found_and_a_server_that_draws_nothing_says_so() -> None:
    async with client_of(FakeOmni()) as client:
        assert (await client.post(URL, json={"prompt": "x", "model": "dall-e-9"})).status_code == 404
    async with client_of(FakeOmni(SPEECH, ECHO)) as client:
        assert (await client.post(URL, json={"prompt": "x"})).status_code == 404


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Server-sent events as (name, content)."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


async def test_previews_leave_before_the_picture_is_finished() -> None:
    omni, gate = FakeOmni(), Gate(open=2)
    omni.before_chunk = gate
    body = {"prompt": "cat", "stream": True, "partial_images": 2, "seed": 5}
    async with client_of(omni) as client, client.stream("POST", URL, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = ""
        async for piece in answer.aiter_text():
            text += piece
            if text.count("\n\n") == 2:
                assert "completed" not in text
                gate.release()
    events = events_of(text)
    names = ["partial_image", "partial_image", "completed"]
    assert [name for name, _ in events] == [f"image_generation.{name}" for name in names]
    assert [content.get("partial_image_index") for _, content in events] == [0, 1, None]
    assert all(content["type"] == name for name, content in events)
    assert np.array_equal(pixels_of(events[-1][1]["b64_json"]), patch("cat", 5, 64, 64))
    assert "usage" in events[-1][1]


async def test_answers_and_events_have_every_field_of_openais_schema() -> None:
    stream = {"stream": "true", "partial_images": "1"}
    async with client_of(FakeOmni()) as client:
        whole = await client.post(URL, json={"prompt": "cat", "n": 3})
        drawn = await client.post(URL, json={"prompt": "cat", "stream": True, "partial_images": 1})
        edited = await client.post(EDITS, data={"prompt": "cat", **stream}, files={"image": png(GREY)})
    ImagesResponse.model_validate(whole.json())
    kinds = (ImageGenPartialImageEvent, ImageGenCompletedEvent)
    kinds += (ImageEditPartialImageEvent, ImageEditCompletedEvent)
    events = [*events_of(drawn.text), *events_of(edited.text)]
    for kind, (_, content) in zip(kinds, events, strict=True):
        kind.model_validate(content)


async def test_streamed_pictures_say_which_of_the_n_they_are() -> None:
    body = {"prompt": "cat", "stream": True, "n": 3, "seed": 7}
    async with client_of(FakeOmni()) as client:
        events = events_of((await client.post(URL, json=body)).text)
    assert sorted((content["index"], content["seed"]) for _, content in events) == [(0, 7), (1, 8), (2, 9)]


async def test_an_error_before_the_first_event_has_a_status_and_one_after_it_is_an_event() -> None:
    omni = FakeOmni()
    omni.before_chunk = failing(Overloaded("full", retry_after=3))
    body = {"prompt": "cat", "stream": True, "partial_images": 1}
    async with client_of(omni) as client:
        early = await client.post(URL, json=body)
        omni.before_chunk = failing(StageFailed("boom"), after=1)
        late = await client.post(URL, json=body)
    assert early.status_code == 503 and early.headers["retry-after"] == "3"
    assert late.status_code == 200
    name, content = events_of(late.text)[-1]
    assert name == "error" and content["error"]["message"] == "boom"


async def test_when_one_of_n_pictures_fails_the_request_fails_and_the_others_are_cancelled() -> None:
    omni, gate = FakeOmni(), Gate()

    async def second_fails(seen: Any) -> None:
        assert isinstance(seen.request, Image)
        if seen.request.seed == 1:
            raise StageFailed("boom")
        await gate(seen)

    omni.before_chunk = second_fails
    async with client_of(omni) as client:
        answer = await client.post(URL, json={"prompt": "cat", "n": 3, "seed": 0})
    assert answer.status_code == 500 and answer.json()["error"]["message"] == "boom"
    assert sorted(str(seen.outcome) for seen in omni.seen) == ["abort", "abort", "failed"]


async def test_a_client_that_leaves_cancels_all_its_pictures() -> None:
    omni, gate = FakeOmni(), Gate()
    omni.before_chunk = gate
    async with client_of(omni) as client:
        asking = asyncio.create_task(client.post(URL, json={"prompt": "cat", "n": 4}))
        await until(lambda: len(omni.seen) == 4)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: all(seen.ended.is_set() for seen in omni.seen))
    assert {seen.outcome for seen in omni.seen} == {"abort"}


async def test_a_lora_is_found_under_the_allowed_folder_only(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "loras", tmp_path / "secret"
    (allowed / "style").mkdir(parents=True)
    outside.mkdir()
    (allowed / "link").symlink_to(outside)
    (allowed / "ring").symlink_to("ring")
    omni = FakeOmni()
    async with client_of(omni, ApiConfig(allowed_lora_path=str(allowed))) as client:

        async def asked(path: str) -> tuple[int, str | None]:
            body = {"prompt": "x", "lora": {"path": path, "scale": 0.5}}
            answer = await client.post(URL, json=body)
            return answer.status_code, answer.json().get("error", {}).get("param")

        assert await asked("style") == (200, None)
        assert await asked(str(allowed / "style")) == (200, None)
        outsiders = ("../secret", "link", str(outside), "/etc/passwd")
        for path in (*outsiders, "missing", "ring", "a\0b", "a" * 300):
            assert await asked(path) == (400, "lora.path"), path
    request = omni.seen[0].request
    assert isinstance(request, Image) and request.lora is not None
    assert request.lora.path == str(allowed / "style") and request.lora.scale == 0.5
