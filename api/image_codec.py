"""Pictures from and to files, with Pillow: only PNG, JPEG and WebP, and none that is larger than it looks.

Everything here blocks; it runs in the media threads.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from omni_async.errors import InvalidRequest

FORMATS = ("PNG", "JPEG", "WEBP")
BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
# What Pillow's parsers raise on damaged files; its EXIF reader adds struct.error.
DAMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    struct.error,
    zlib.error,
)
WHITE = (255, 255, 255, 255)


def read_picture(data: bytes, max_pixels: int, param: str = "image") -> NDArray[np.uint8]:
    """uint8 `[height, width, 3]`, or 4 where the file has transparency; turned as its EXIF data says.

    Raises `InvalidRequest` for what is no single picture of at most `max_pixels`, before it is decoded
    where the file's header says so.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
            _refuse_size(picture, max_pixels, param)
            # Cameras put a preview behind the picture (MPO); that is no animation.
            if picture.format != "MPO" and getattr(picture, "n_frames", 1) > 1:
                raise InvalidRequest(f"{param} is animated; send a single picture.", param=param)
            picture.load()
            return np.asarray(_as_rgb(ImageOps.exif_transpose(picture)))
    except BOMBS as error:
        raise _too_large(str(error), max_pixels, param) from error
    except DAMAGE as error:
        message = f"{param} is no readable PNG, JPEG or WebP file."
        raise InvalidRequest(message, param=param, code="invalid_image") from error


def read_mask(data: bytes, max_pixels: int, size: tuple[int, int]) -> NDArray[np.uint8]:
    """uint8 `[height, width]`, 255 where the picture of `size` (width, height) is to be changed.

    What is transparent in a mask with transparency is to be changed, else what is white.
    """
    picture = Image.fromarray(read_picture(data, max_pixels, "mask_image"))
    if picture.size != size:
        message = (
            f"mask_image is {picture.width}x{picture.height}; it must have the image's size, "
            f"{size[0]}x{size[1]}."
        )
        raise InvalidRequest(message, param="mask_image")
    if picture.mode == "RGBA":
        return 255 - np.asarray(picture.getchannel("A"))
    return np.asarray(picture.convert("L"))


def _refuse_size(picture: Image.Image, max_pixels: int, param: str) -> None:
    if picture.width * picture.height > max_pixels:
        raise _too_large(f"It is {picture.width}x{picture.height}", max_pixels, param)


def _too_large(why: str, max_pixels: int, param: str) -> InvalidRequest:
    message = f"{param} has too many pixels; at most {max_pixels} are taken. {why.rstrip('.')}."
    return InvalidRequest(message, param=param, code="image_too_large")


def _as_rgb(picture: Image.Image) -> Image.Image:
    transparent = picture.mode in ("LA", "PA") or "transparency" in picture.info
    if picture.mode == "RGBA" or (picture.mode == "RGB" and not transparent):
        return picture
    if picture.mode.startswith("I;16") or picture.mode == "I":
        return Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8)).convert("RGB")
    return picture.convert("RGBA" if transparent else "RGB")


def write_picture(
    pixels: NDArray[np.uint8], kind: str, compression: int | None, *, opaque: bool = False
) -> bytes:
    """The file: `kind` is png, jpeg or webp; `compression` 0…100 is the quality of the last two.

    `opaque` lays what is transparent on white.
    """
    picture = Image.fromarray(pixels)
    if opaque and picture.mode == "RGBA":
        white = Image.new("RGBA", picture.size, WHITE)
        picture = Image.alpha_composite(white, picture).convert("RGB")
    options: dict[str, Any] = {} if kind == "png" or compression is None else {"quality": compression}
    file = io.BytesIO()
    picture.save(file, kind.upper(), **options)
    return file.getvalue()
