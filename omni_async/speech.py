"""The `Speech` request: its fields, and its resolution against what a pipeline can do."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_async.config import ChatConfig, SpeechConfig
from omni_async.errors import InvalidRequest

TaskType = Literal["CustomVoice", "VoiceDesign", "Base"]
OPTIONAL_FIELDS = (
    "speed",
    "instructions",
    "language",
    "task_type",
    "ref_audio",
    "ref_text",
    "x_vector_only_mode",
    "speaker_embedding",
    "max_new_tokens",
    "initial_codec_chunk_frames",
)


class SpeechOptions(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """How a text is to be spoken. Fields that are None or absent take the pipeline's default."""

    model: str | None = None
    voice: str | None = None
    speed: Annotated[float, Meta(ge=0.25, le=4.0)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    instructions: str | None = None
    language: str | None = None
    task_type: TaskType | None = None
    ref_audio: str | None = None
    ref_text: str | None = None
    x_vector_only_mode: bool | None = None
    speaker_embedding: list[float] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    initial_codec_chunk_frames: Annotated[int, Meta(ge=1)] | None = None
    extra_params: dict[str, Any] | None = None


class Speech(SpeechOptions, kw_only=True, frozen=True):
    """Text to be spoken.

    `gapless` says that a listener plays the answer while it is made; False (a whole file) yields to
    listeners under load.
    """

    input: str
    gapless: bool = True

    def resolve(self, pipeline: SpeechConfig) -> dict[str, Any]:
        """The parameters for the stages. Raises `InvalidRequest` naming the field at fault."""
        if not has_speakable_text(self.input):
            raise InvalidRequest(
                "input has nothing to speak: it needs at least one letter or digit.", param="input"
            )
        params: dict[str, Any] = {"text": self.input, "voice": resolve_voice(self.voice, pipeline)}
        for name in OPTIONAL_FIELDS:
            value = getattr(self, name)
            if value is None:
                continue
            if name not in pipeline.fields and not (name == "speed" and value == 1.0):
                raise InvalidRequest(f"{name} is not supported by this model.", param=name)
            params[name] = value
        params.update(resolve_extra_params(self.extra_params or {}, pipeline))
        return params


def has_speakable_text(text: str) -> bool:
    """Whether `text` has a letter or digit: blank, emoji-only and punctuation-only text has none."""
    return any(unicodedata.category(ch)[0] in "LN" for ch in text)


def resolve_voice(voice: str | None, pipeline: SpeechConfig | ChatConfig, param: str = "voice") -> str:
    """The pipeline's own name for `voice`, case-insensitive and through aliases."""
    if voice is None:
        return pipeline.default_voice
    wanted = voice.strip().lower()
    names = {name.lower(): name for name in pipeline.voices}
    aliases = {alias.lower(): name for alias, name in pipeline.voice_aliases.items()}
    found = names.get(wanted) or aliases.get(wanted)
    if found is None:
        known = ", ".join([*pipeline.voices, *pipeline.voice_aliases])
        message = f"Unknown voice {voice!r}. Known voices: {known}."
        raise InvalidRequest(message, param=param, code="unknown_voice")
    return found


def resolve_extra_params(extra: dict[str, Any], pipeline: SpeechConfig) -> dict[str, Any]:
    """`extra`, each key checked against the declaration in the model's folder."""
    for key, value in extra.items():
        param = f"extra_params.{key}"
        rule = pipeline.extra_params.get(key)
        if rule is None:
            known = ", ".join(pipeline.extra_params) or "none"
            raise InvalidRequest(f"Unknown extra parameter {key!r}. Known: {known}.", param=param)
        _check_rule(value, rule, param)
    return dict(extra)


_TYPES: dict[str, tuple[type, ...]] = {"float": (float, int), "int": (int,), "bool": (bool,), "str": (str,)}


def _check_rule(value: Any, rule: dict[str, Any], param: str) -> None:
    kind = rule.get("type", "float")
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise InvalidRequest(f"{param} must be of type {kind}.", param=param)
    if "choices" in rule and value not in rule["choices"]:
        raise InvalidRequest(f"{param} must be one of {rule['choices']}.", param=param)
    low, high = rule.get("ge", value), rule.get("le", value)
    if not low <= value <= high:
        raise InvalidRequest(f"{param} must be between {low} and {high}.", param=param)
