"""The `Image` request: its fields, and its resolution against what a pipeline can do."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_async.config import ImageConfig
from omni_async.errors import InvalidRequest

SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")
Scale = Annotated[float, Meta(ge=0.0, le=20.0)]
OPTIONAL_FIELDS = (
    "negative_prompt",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
    "strength",
    "layers",
)
ALWAYS = ("num_inference_steps",)
"""Optional fields that every diffusion pipeline honours."""


class Lora(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter: a folder or safetensors file `path` on the server, applied with weight `scale`; errors
    call it by its `name`."""

    path: str
    name: str = ""
    scale: Annotated[float, Meta(ge=-10.0, le=10.0)] = 1.0


class ImageOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a picture is to be made. Fields that are None or absent take the pipeline's default."""

    model: str | None = None
    size: str | None = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=200)] | None = None
    guidance_scale: Scale | None = None
    true_cfg_scale: Scale | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    strength: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    layers: Annotated[int, Meta(ge=1, le=16)] | None = None
    lora: Lora | None = None


class Image(ImageOptions, kw_only=True, frozen=True):
    """A picture to be made from `prompt`, or from `images` by it.

    `images` and `mask` are uint8 arrays `[height, width, 3 or 4]` and `[height, width]` (255: to be
    changed). With `progress` every denoise step is told; `partial_images` previews are spread over the
    steps. `num_frames` above 1 makes a film of pipelines that can.
    """

    prompt: str
    images: tuple[Any, ...] = ()
    mask: Any = None
    progress: bool = False
    partial_images: Annotated[int, Meta(ge=0, le=3)] = 0
    num_frames: Annotated[int, Meta(ge=1, le=1024)] | None = None

    def resolve(self, pipeline: ImageConfig, max_pixels: int | None = None) -> dict[str, Any]:
        """The parameters for the stages. Raises `InvalidRequest` naming the field at fault.

        `max_pixels` is the largest height × width that is made.
        """
        if not self.prompt.strip():
            raise InvalidRequest("prompt is blank.", param="prompt")
        self._refuse_media(pipeline)
        params: dict[str, Any] = {"prompt": self.prompt, **resolve_size(self, pipeline, max_pixels)}
        for name in (*OPTIONAL_FIELDS, "num_frames"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in (*pipeline.fields, *ALWAYS):
                raise InvalidRequest(f"{name} is not supported by this model.", param=name)
            params[name] = value
        if params.get("num_inference_steps", pipeline.min_steps) < pipeline.min_steps:
            message = f"num_inference_steps must be at least {pipeline.min_steps} for this model."
            raise InvalidRequest(message, param="num_inference_steps")
        if self.lora is not None:
            params["lora"] = self._resolve_lora(pipeline, self.lora)
        params |= {key: True for key in ("progress",) if self.progress}
        params |= {"partial_images": self.partial_images} if self.partial_images else {}
        return params

    def _refuse_media(self, pipeline: ImageConfig) -> None:
        count = len(self.images)
        if count > pipeline.max_images:
            many = f"takes at most {pipeline.max_images} images" if pipeline.max_images else "takes no image"
            raise InvalidRequest(f"This model {many}; {count} were sent.", param="image")
        if pipeline.needs_image and not count:
            raise InvalidRequest(
                "This model changes images and needs one; use /v1/images/edits.", param="image"
            )
        if self.mask is not None and "mask_image" not in pipeline.fields:
            raise InvalidRequest("mask_image is not supported by this model.", param="mask_image")
        if self.mask is not None and not count:
            raise InvalidRequest("mask_image needs an image that it is for.", param="mask_image")
        if self.strength is not None and not count:
            raise InvalidRequest("strength needs an image that is changed.", param="strength")
        if self.background == "transparent" and "background" not in pipeline.fields:
            message = "This model makes opaque pictures; background must be opaque or auto."
            raise InvalidRequest(message, param="background")

    def _resolve_lora(self, pipeline: ImageConfig, lora: Lora) -> dict[str, Any]:
        if "lora" not in pipeline.fields:
            raise InvalidRequest("lora is not supported by this model.", param="lora")
        return {"path": lora.path, "scale": lora.scale, "name": lora.name or lora.path.rsplit("/", 1)[-1]}


def resolve_size(image: Image, pipeline: ImageConfig, max_pixels: int | None = None) -> dict[str, Any]:
    """`width` and `height` that the stages make, and `upscale_to` where the answer is larger.

    Raises `InvalidRequest` naming the nearest size that is made.
    """
    if image.size is None or image.size == "auto":
        first = image.images[0] if image.images else None
        size = (
            pipeline.default_size if first is None or pipeline.sizes else _like(first, pipeline, max_pixels)
        )
    else:
        size = image.size
    if size in pipeline.upscaled_sizes:
        width, height = parse_size(pipeline.upscaled_sizes[size])
        return {"width": width, "height": height, "upscale_to": parse_size(size)}
    width, height = parse_size(size)
    nearest = nearest_size(width, height, pipeline, max_pixels)
    if (width, height) != nearest:
        raise InvalidRequest(
            f"size {size} is not made by this model; the nearest size is {nearest[0]}x{nearest[1]}.",
            param="size",
            code="unsupported_size",
        )
    return {"width": width, "height": height}


def parse_size(size: str) -> tuple[int, int]:
    """`WxH` as pixels. Raises `InvalidRequest`."""
    found = SIZE.fullmatch(size)
    if found is None:
        raise InvalidRequest("size must be WIDTHxHEIGHT in pixels, or auto.", param="size")
    return int(found[1]), int(found[2])


def _like(image: Any, pipeline: ImageConfig, max_pixels: int | None) -> str:
    height, width = image.shape[:2]
    width, height = nearest_size(width, height, pipeline, max_pixels)
    return f"{width}x{height}"


def nearest_size(
    width: int, height: int, pipeline: ImageConfig, max_pixels: int | None = None
) -> tuple[int, int]:
    """The allowed size that is nearest to the one wanted."""
    if pipeline.sizes:
        known = [parse_size(size) for size in (*pipeline.sizes, *pipeline.upscaled_sizes)]
        return min(known, key=lambda size: abs(size[0] - width) + abs(size[1] - height))
    step, low, high = pipeline.multiple_of, pipeline.min_side, pipeline.max_side
    near = [min(max(round(side / step) * step, low), high) for side in (width, height)]
    limit = max_pixels or high * high
    if near[0] * near[1] > limit:
        shrink = (limit / (near[0] * near[1])) ** 0.5
        near = [max(int(side * shrink) // step * step, low) for side in near]
    return near[0], near[1]
