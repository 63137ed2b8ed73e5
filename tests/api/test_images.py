from __future__ import annotations

import asyncio
import base64
import io
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import serving
from fake_omni import ECHO, SPEECH, FakeOmni, Gate, failing, patch
from numpy.typing import NDArray
from PIL import Image as Pillow
from serving import until

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


def png(pixels: NDArray[np.uint8], kind: str = "PNG", **options: Any) -> bytes:
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
    assert opaque.shape == (64, 64, 3) and opaque.min() > 250
    assert clear.shape == (64, 64, 4) and clear[..., 3].max() == 0


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
    ({"prompt": "x", "lora": {"path": "a"}}, "lora"),
    ({"prompt": "x", "lora": {"scale": 1}}, "lora.path"),
    ({"prompt": "x", "quality": "high"}, "quality"),
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
    omni = FakeOmni()
    async with client_of(omni, ApiConfig(allowed_lora_path=str(allowed))) as client:

        async def status(path: str) -> int:
            body = {"prompt": "x", "lora": {"path": path, "scale": 0.5}}
            return (await client.post(URL, json=body)).status_code

        assert await status("style") == 200
        assert await status(str(allowed / "style")) == 200
        for path in ("../secret", "link", str(outside), "missing", "/etc/passwd"):
            assert await status(path) == 400
    request = omni.seen[0].request
    assert isinstance(request, Image) and request.lora is not None
    assert request.lora.path == str(allowed / "style") and request.lora.scale == 0.5


async def test_an_edit_gets_its_images_and_mask_decoded() -> None:
    omni = FakeOmni()
    mask = np.zeros((64, 64, 4), np.uint8)
    mask[:, 32:, 3] = 255
    files = [
        ("image[]", ("a.png", png(GREY))),
        ("image[]", ("b.webp", png(GREY // 2, "WEBP", lossless=True))),
    ]
    async with client_of(omni) as client:
        answer = await client.post(
            EDITS,
            data={"prompt": "greener", "strength": "0.5", "seed": "3", "n": "2"},
            files=[*files, ("mask", ("m.png", png(mask)))],
        )
    assert answer.status_code == 200, answer.text
    assert [each["seed"] for each in answer.json()["data"]] == [3, 4]
    assert answer.json()["usage"]["input_tokens_details"]["image_tokens"] == 2 * 16
    request = omni.seen[0].request
    assert isinstance(request, Image) and request.strength == 0.5
    assert np.array_equal(request.images[0], GREY) and np.array_equal(request.images[1], GREY // 2)
    assert request.mask[:, :32].min() == 255 and request.mask[:, 32:].max() == 0


async def test_the_size_of_an_edit_is_the_images_own_unless_one_is_asked_for() -> None:
    async with client_of(FakeOmni()) as client:
        files = {"image": png(np.zeros((100, 203, 3), np.uint8))}
        own = await client.post(EDITS, data={"prompt": "x"}, files=files)
        other = await client.post(EDITS, data={"prompt": "x", "size": "64x64"}, files=files)
    assert own.json()["size"] == "208x96"
    assert other.json()["size"] == "64x64"


async def test_an_edit_is_streamed_under_its_own_names() -> None:
    async with client_of(FakeOmni()) as client:
        form = {"prompt": "x", "stream": "true", "partial_images": "1"}
        answer = await client.post(EDITS, data=form, files={"image": png(GREY)})
    assert [name for name, _ in events_of(answer.text)] == [
        "image_edit.partial_image",
        "image_edit.completed",
    ]


def _jpeg_turned() -> bytes:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    return png(np.zeros((64, 128, 3), np.uint8), "JPEG", exif=exif)


async def test_pictures_of_every_mode_are_taken_and_turned_as_their_exif_says() -> None:
    omni = FakeOmni()
    rng = np.random.default_rng(0)
    grey16 = (rng.integers(0, 2**16, (64, 64))).astype(np.uint16)
    palette = Pillow.fromarray(GREY).convert("P")
    cmyk = Pillow.fromarray(GREY).convert("CMYK")
    files = [_jpeg_turned(), png(GREY[..., 0]), png(grey16)]
    for picture, kind in ((palette, "PNG"), (cmyk, "JPEG")):
        file = io.BytesIO()
        picture.save(file, kind)
        files.append(file.getvalue())
    async with client_of(omni) as client:
        for data in files:
            answer = await client.post(EDITS, data={"prompt": "x"}, files={"image": data})
            assert answer.status_code == 200, answer.text
    shapes = [seen.request.images[0].shape for seen in omni.seen if isinstance(seen.request, Image)]
    assert shapes == [(128, 64, 3), *[(64, 64, 3)] * 4]
    sixteen = omni.seen[2].request
    assert isinstance(sixteen, Image)
    assert np.array_equal(sixteen.images[0][..., 0], grey16 >> 8)


def _bomb() -> bytes:
    """A PNG whose header promises 60000 × 60000 pixels."""
    data = bytearray(png(GREY))
    data[16:24] = (60000).to_bytes(4, "big") * 2
    return bytes(data)


def _animation() -> bytes:
    file = io.BytesIO()
    frames = [Pillow.fromarray(GREY), Pillow.fromarray(GREY // 2)]
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    return file.getvalue()


GOOD = png(GREY)
BAD_EDITS: list[tuple[dict[str, Any], list[tuple[str, bytes]], str | None]] = [
    ({"prompt": "x"}, [], "image"),
    ({"prompt": "x"}, [("image", b"no picture")], "image"),
    ({"prompt": "x"}, [("image", GOOD[: len(GOOD) // 2])], "image"),
    ({"prompt": "x"}, [("image", b"")], "image"),
    ({"prompt": "x"}, [("image", _bomb())], "image"),
    ({"prompt": "x"}, [("image", _animation())], "image"),
    ({"prompt": "x"}, [("image", GOOD)] * 3, "image"),
    ({"prompt": "x"}, [("image", GOOD)] * 5, "image"),
    ({"prompt": "x"}, [("image", GOOD), ("mask_image", png(GREY[:32]))], "mask_image"),
    ({"prompt": "x"}, [("image", GOOD), ("mask_image", b"?")], "mask_image"),
    ({"prompt": "x"}, [("image", GOOD), ("audio", GOOD)], "audio"),
    ({}, [("image", GOOD)], "prompt"),
    ({"prompt": "x", "strength": "2"}, [("image", GOOD)], "strength"),
    ({"prompt": "x", "n": "many"}, [("image", GOOD)], "n"),
    ({"prompt": "x", "colour": "red"}, [("image", GOOD)], "colour"),
    ({"prompt": ["x", "y"]}, [("image", GOOD)], "prompt"),
    ({"prompt": "x", "image": "text"}, [("image", GOOD)], "image"),
    ({"prompt": "x", "lora": "{"}, [("image", GOOD)], None),
    ({"prompt": "x", "url": "ftp://a/b"}, [], "url"),
    ({"prompt": "x", "url": "data:image/png;base64,!!"}, [], "url"),
    ({"prompt": "x", "url": "http://127.0.0.1/a.png"}, [], "url"),
    ({"prompt": "x", "url": "file:///etc/passwd"}, [], "url"),
]


@pytest.mark.parametrize(("form", "files", "param"), BAD_EDITS)
async def test_a_wrong_edit_is_refused_by_the_name_of_its_field(
    form: dict[str, Any], files: list[tuple[str, bytes]], param: str | None
) -> None:
    omni = FakeOmni()
    parts = [(name, ("f.png", data)) for name, data in files]
    async with client_of(omni) as client:
        if parts:
            answer = await client.post(EDITS, data=form, files=parts)
        else:
            boundary = {"content-type": "multipart/form-data; boundary=b"}
            text = "".join(
                f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
                for name, value in form.items()
            )
            answer = await client.post(EDITS, content=f"{text}--b--\r\n", headers=boundary)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not omni.seen


async def test_an_edit_may_name_its_image_by_a_data_address() -> None:
    omni = FakeOmni()
    url = "data:image/png;base64," + base64.b64encode(GOOD).decode()
    async with client_of(omni) as client:
        answer = await client.post(EDITS, data={"prompt": "x", "url": url}, files={"image": GOOD})
    assert answer.status_code == 200
    request = omni.seen[0].request
    assert isinstance(request, Image)
    assert all(np.array_equal(image, GREY) for image in request.images) and len(request.images) == 2


async def test_forms_of_another_type_or_of_too_many_bytes_are_refused() -> None:
    async with client_of(FakeOmni(), ApiConfig(max_upload_bytes=2000)) as client:
        json_body = await client.post(EDITS, json={"prompt": "x"})
        large = await client.post(EDITS, data={"prompt": "x"}, files={"image": bytes(5000)})
    assert json_body.status_code == 415
    assert large.status_code == 413
