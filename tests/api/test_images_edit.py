"""`POST /v1/images/edits`: forms, and the pictures in them."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import jsonschema
import numpy as np
import pytest
from fake_omni import FakeOmni
from PIL import Image as Pillow
from PIL import ImageFile
from starlette.types import Message, Scope
from test_images import EDITS, GREY, client_of, events_of, png

from omni_async.api.config import ApiConfig
from omni_async.api.errors import ClientGone
from omni_async.api.image_form import read_edit
from omni_async.api.image_job import ImageService
from omni_async.api.media_pool import MediaPool
from omni_async.api.media_source import MediaSource
from omni_async.api.openapi import openapi_document
from omni_async.image import Image


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


def _bomb(side: int = 60000) -> bytes:
    """A PNG whose header, checksum and all, promises `side` × `side` pixels."""
    data = bytearray(png(GREY))
    data[16:24] = side.to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
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
    ({"prompt": "x", "lora": "{"}, [("image", GOOD)], "lora"),
    ({"prompt": "x", "quality": "high"}, [("image", GOOD)], "quality"),
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


@pytest.mark.parametrize("side", [5000, 10_000, 60_000])
async def test_a_picture_of_too_many_pixels_is_refused_by_its_header_alone(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoded(picture: Any) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decoded)
    async with client_of(FakeOmni()) as client:
        answer = await client.post(EDITS, data={"prompt": "x"}, files={"image": _bomb(side)})
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == ("image", "image_too_large")


async def test_a_camera_s_picture_with_a_preview_behind_it_is_no_animation() -> None:
    omni, file = FakeOmni(), io.BytesIO()
    Pillow.fromarray(GREY).save(file, "MPO", save_all=True, append_images=[Pillow.fromarray(GREY // 2)])
    async with client_of(omni) as client:
        answer = await client.post(EDITS, data={"prompt": "x"}, files={"image": file.getvalue()})
    assert answer.status_code == 200, answer.text
    request = omni.seen[0].request
    assert isinstance(request, Image) and abs(request.images[0].astype(int) - GREY).max() < 3


async def test_a_colour_that_stands_for_transparency_becomes_an_alpha_channel() -> None:
    omni = FakeOmni()
    async with client_of(omni) as client:
        await client.post(EDITS, data={"prompt": "x"}, files={"image": png(GREY, transparency=(90, 90, 90))})
    request = omni.seen[0].request
    assert isinstance(request, Image)
    assert request.images[0].shape == (64, 64, 4) and request.images[0][..., 3].max() == 0


async def test_a_picture_with_damaged_exif_data_is_the_callers_fault() -> None:
    exif = Pillow.Exif()
    exif[0x0112], exif[0x0100] = 6, 64
    whole, width = exif.tobytes(), struct.pack(">HH", 0x0100, 4)
    assert width in whole
    damaged = png(GREY, "JPEG", exif=whole.replace(width, struct.pack(">HH", 0x0100, 1)))
    async with client_of(FakeOmni()) as client:
        answer = await client.post(EDITS, data={"prompt": "x"}, files={"image": damaged})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_image"


async def test_a_request_that_is_wrong_anyway_has_no_picture_read() -> None:
    async with client_of(FakeOmni()) as client:
        form = {"prompt": "x", "model": "dall-e-9"}
        answer = await client.post(EDITS, data=form, files={"image": b"no picture"})
    assert answer.status_code == 404


async def test_a_data_address_may_be_as_long_as_a_picture_is() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (700, 700, 3)).astype(np.uint8)
    url = "data:image/png;base64," + base64.b64encode(png(noise)).decode()
    assert len(url) > 1024 * 1024
    omni = FakeOmni()
    async with client_of(omni) as client:
        answer = await client.post(
            EDITS, data={"prompt": "x", "size": "64x64", "url": url}, files={"image": GOOD}
        )
    assert answer.status_code == 200, answer.text
    request = omni.seen[0].request
    assert isinstance(request, Image) and np.array_equal(request.images[1], noise)


async def test_a_client_that_leaves_within_its_form_is_gone_and_no_error() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    config, media = ApiConfig(), MediaPool(1)
    kind = (b"content-type", b"multipart/form-data; boundary=b")
    scope: Scope = {"type": "http", "method": "POST", "headers": [kind]}
    try:
        with pytest.raises(ClientGone):
            await read_edit(scope, receive, ImageService(FakeOmni(), config, media), MediaSource(config))
    finally:
        media.close()


def test_the_described_form_takes_images_and_refuses_unknown_fields() -> None:
    document = openapi_document(has_echo=False)
    edit = document["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]["multipart/form-data"]
    described = {"$ref": edit["schema"]["$ref"], "components": document["components"]}
    form = {"prompt": "x", "image": ["a"], "url[]": ["b"], "mask": "c", "strength": 0.5}
    jsonschema.validate(form, described)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**form, "colour": "red"}, described)


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
