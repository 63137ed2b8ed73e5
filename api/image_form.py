"""The multipart form of `POST /v1/images/edits`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope

from omni_async.api.errors import ClientGone, TooLarge, WrongContentType, invalid_json
from omni_async.api.exchange import header
from omni_async.api.image_fields import ImageFields, Upload
from omni_async.api.image_job import ImageService
from omni_async.api.media_source import MediaSource
from omni_async.errors import InvalidRequest

IMAGE_NAMES = ("image", "image[]")
URL_NAMES = ("url", "url[]")
MASK_NAMES = ("mask_image", "mask")
MAX_FIELDS = 64


class _Form(msgspec.Struct):
    """The parts of a form by what they are for."""

    images: list[bytes] = []
    urls: list[str] = []
    masks: list[bytes] = []
    fields: dict[str, str] = {}


async def read_edit(
    scope: Scope, receive: Receive, service: ImageService, source: MediaSource
) -> tuple[ImageFields, Upload]:
    """The fields, and the pictures decoded.

    Raises `InvalidRequest`, `TooLarge`, `WrongContentType` or `ClientGone`.
    """
    form = await _read(scope, receive, service.config.max_upload_bytes)
    fields = _fields(form.fields)
    service.accept(fields)
    limit = service.config.max_edit_images
    if not 1 <= len(form.images) + len(form.urls) <= limit:
        count = len(form.images) + len(form.urls)
        raise InvalidRequest(f"1 to {limit} images are taken; {count} were sent.", param="image")
    return fields, await service.media.run(lambda: _decode(form, service, source))


def _decode(form: _Form, service: ImageService, source: MediaSource) -> Upload:
    from omni_async.api.image_codec import read_mask, read_picture

    pixels = service.config.max_image_pixels
    files = [*form.images, *(source.read(url) for url in form.urls)]
    images = tuple(read_picture(data, pixels) for data in files)
    height, width = images[0].shape[:2]
    mask = read_mask(form.masks[0], pixels, (width, height)) if form.masks else None
    return Upload(images, mask)


async def _read(scope: Scope, receive: Receive, limit: int) -> _Form:
    given = header(scope, b"content-type") or b""
    if given.partition(b";")[0].strip().lower() != b"multipart/form-data":
        raise WrongContentType("The body must be sent with Content-Type: multipart/form-data.")
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise TooLarge(f"The body has {int(declared)} bytes; at most {limit} are taken.")
    request = Request(scope, _Limited(receive, limit))
    try:
        # A text field may be a data: URL with a whole picture, so only the body's own limit holds for it.
        async with request.form(max_fields=MAX_FIELDS, max_part_size=limit) as parts:
            form = _Form()
            for name, value in parts.multi_items():
                await _sort(form, name, value)
            return form
    except ClientDisconnect:
        raise ClientGone from None
    except (MultiPartException, HTTPException) as error:
        text = error.detail if isinstance(error, HTTPException) else error.message
        raise InvalidRequest(f"The body is no valid form: {text}", code="invalid_form") from None


async def _sort(form: _Form, name: str, value: UploadFile | str) -> None:
    if isinstance(value, UploadFile):
        if name in IMAGE_NAMES:
            form.images.append(await value.read())
        elif name in MASK_NAMES and not form.masks:
            form.masks.append(await value.read())
        else:
            raise InvalidRequest(f"{name}: no file is taken under this name.", param=name)
    elif name in URL_NAMES:
        form.urls.append(value)
    elif name in (*IMAGE_NAMES, *MASK_NAMES):
        raise InvalidRequest(f"{name} must be a file; an address goes into url.", param=name)
    elif name in form.fields:
        raise InvalidRequest(f"{name} stands twice.", param=name)
    else:
        form.fields[name] = value


def _fields(given: Mapping[str, Any]) -> ImageFields:
    """Text fields as a JSON body would have them: only `lora` is JSON of its own."""
    if "lora" in given:
        given = {**given, "lora": _json(given["lora"], "lora")}
    try:
        return msgspec.convert(given, ImageFields, strict=False)
    except msgspec.DecodeError as error:
        raise invalid_json(error) from None


def _json(text: str, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        message = f"{param} is not valid JSON: {error}."
        raise InvalidRequest(message, param=param, code="invalid_json") from None


class _Limited:
    """A `receive` that refuses a body above `limit` bytes."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._left = limit
        self._limit = limit

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise TooLarge(f"The body is larger than {self._limit} bytes.")
        return message
