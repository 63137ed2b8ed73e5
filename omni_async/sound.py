"""The `Sound` request: sound made from a description, which is not speech."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from omni_async.config import SoundConfig
from omni_async.errors import InvalidRequest
from omni_async.image import Scale

OPTIONAL_FIELDS = ("negative_prompt", "guidance_scale", "audio_start_in_s")


class Sound(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`seconds` of what `prompt` describes. Fields that are None take the pipeline's default."""

    prompt: str
    model: str | None = None
    seconds: Annotated[float, Meta(gt=0.0)] | None = None
    audio_start_in_s: Annotated[float, Meta(ge=0.0)] | None = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=200)] | None = None
    guidance_scale: Scale | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    progress: bool = False

    def resolve(self, pipeline: SoundConfig) -> dict[str, Any]:
        """The parameters for the stages. Raises `InvalidRequest` naming the field at fault."""
        if not self.prompt.strip():
            raise InvalidRequest("prompt is blank.", param="prompt")
        seconds = self.seconds or pipeline.max_seconds - (self.audio_start_in_s or 0.0)
        if seconds <= 0:
            message = f"audio_start_in_s must be below {pipeline.max_seconds:g}, the seconds that are made."
            raise InvalidRequest(message, param="audio_start_in_s")
        if seconds > pipeline.max_seconds:
            message = f"This model makes at most {pipeline.max_seconds:g} s."
            raise InvalidRequest(message, param="seconds")
        params: dict[str, Any] = {"prompt": self.prompt, "seconds": seconds}
        for name in (*OPTIONAL_FIELDS, "num_inference_steps"):
            value = getattr(self, name)
            if value is None:
                continue
            if name in OPTIONAL_FIELDS and name not in pipeline.fields:
                raise InvalidRequest(f"{name} is not supported by this model.", param=name)
            params[name] = value
        return params | ({"progress": True} if self.progress else {})
