"""What one diffusion request asks for: its parameters, typed and checked once, at admission."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from omni_async.errors import ConfigError, InvalidRequest


class LoraSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA's file or folder, its weight, and what errors call it."""

    path: str
    scale: float = 1.0
    name: str = "the LoRA"


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The caller's parameters over the stage's defaults.

    `guidance_scale` and `true_cfg_scale` are None where neither names one: the pipeline's own default.
    `strength` is the share of the steps that change an input image. `seconds` is of sound.
    """

    prompt: str
    negative_prompt: str | None = None
    width: int = 0
    height: int = 0
    num_inference_steps: int = 28
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    strength: float = 0.6
    max_sequence_length: int | None = None
    num_frames: int = 1
    fps: float = 16.0
    seconds: float = 0.0
    audio_start_in_s: float = 0.0
    layers: int | None = None
    lora: LoraSpec | None = None
    progress: bool = False
    partial_images: int = 0
    upscale_to: tuple[int, int] | None = None


def parse(params: Mapping[str, Any]) -> Spec:
    """`params` as a `Spec`. Raises `InvalidRequest` with the field at fault."""
    try:
        return msgspec.convert(dict(params), Spec)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        raise InvalidRequest(f"{message}.", param=path.rstrip("`") or None) from None


def check_defaults(params: Mapping[str, Any], stage: str) -> None:
    """Raises `ConfigError` when a stage's `default_sampling_params` are not fields of a `Spec`."""
    try:
        parse({**params, "prompt": "a cat"})
    except InvalidRequest as error:
        raise ConfigError(f"Stage {stage}: default_sampling_params: {error.message}") from None
