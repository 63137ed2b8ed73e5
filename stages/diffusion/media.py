"""What a diffusion pipeline puts out: pictures, previews, films and sound."""

from __future__ import annotations

from typing import Any

from omni_async.stages.diffusion.pictures import resized
from omni_async.stages.diffusion.spec import Spec
from omni_async.stages.executor import StepOutput


def picture(pixels: Any, spec: Spec, told: dict[str, Any], partial: int | None = None) -> StepOutput:
    """uint8 `[height, width, 3]`, enlarged where the request asks for it; a preview if `partial` says which.

    `told` has the seed, the step and the number of steps.
    """
    meta = dict(told) if partial is None else {**told, "partial": partial}
    if spec.upscale_to is not None:
        meta["upscaled_from"] = [pixels.shape[1], pixels.shape[0]]
        pixels = resized(pixels, spec.upscale_to)
    return StepOutput(tensors={"pixels": pixels}, meta=meta, final=partial is None)


def finished(media: Any, spec: Spec, told: dict[str, Any], sample_rate: int) -> StepOutput:
    """The last output: a picture, a film `[frames, height, width, 3]`, or sound `[samples, channels]`."""
    if media.dtype == "float32":
        duration = len(media) / sample_rate
        return StepOutput({"pcm": media}, {"sample_rate": sample_rate}, duration=duration, final=True)
    if media.ndim == 4 and spec.num_frames > 1:
        return StepOutput({"frames": media}, {"fps": spec.fps, "seed": told["seed"]}, final=True)
    return picture(media, spec, told)
