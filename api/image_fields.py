"""The fields of the image routes as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_async.errors import InvalidRequest
from omni_async.image import Image, ImageOptions

OutputFormat = Literal["png", "jpeg", "jpg", "webp"]
MAX_SEED = 2**63 - 1


class ImageFields(ImageOptions, kw_only=True, frozen=True):
    """The body of `POST /v1/images/generations`, and the text fields of `POST /v1/images/edits`.

    null is absent. Image i of `n` has seed + i. `quality` and `moderation` are there for clients that send
    OpenAI's defaults: no other value would have an effect.
    """

    prompt: str
    n: Annotated[int, Meta(ge=1, le=10)] | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: OutputFormat | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Meta(ge=0, le=3)] | None = None
    quality: Literal["auto"] | None = None
    moderation: Literal["auto"] | None = None


class Upload(msgspec.Struct, frozen=True):
    """What is changed: uint8 arrays `[height, width, 3 or 4]`, and the mask `[height, width]`."""

    images: tuple[Any, ...] = ()
    mask: Any = None


def refuse_conflicts(fields: ImageFields) -> None:
    """Raises `InvalidRequest` for fields that would have no effect beside the others, or no meaning."""
    kind = fields.output_format or "png"
    if fields.output_compression is not None and kind == "png":
        message = "output_compression has no effect on png; use jpeg or webp."
        raise InvalidRequest(message, param="output_compression")
    if fields.partial_images is not None and not fields.stream:
        raise InvalidRequest("partial_images needs stream: true.", param="partial_images")
    if fields.background == "transparent" and kind in ("jpeg", "jpg"):
        raise InvalidRequest("jpeg has no transparent background; use png or webp.", param="background")
    if (fields.seed or 0) + (fields.n or 1) - 1 > MAX_SEED:
        raise InvalidRequest(f"The seed of the last image, seed + n - 1, passes {MAX_SEED}.", param="seed")


def image_of(fields: ImageFields, upload: Upload, seed: int | None) -> Image:
    """The request for the engine."""
    options: dict[str, Any] = {name: getattr(fields, name) for name in ImageOptions.__struct_fields__}
    options["seed"] = seed
    return Image(
        **options,
        prompt=fields.prompt,
        images=upload.images,
        mask=upload.mask,
        partial_images=fields.partial_images or 0,
    )
