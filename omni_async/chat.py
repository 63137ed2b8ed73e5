"""The `Chat` request: a conversation, or a text to be continued, and what is to come back.

Media travel beside it as arrays, which its messages name: `{"type": "image_url", "image_url": {"url":
"omni:image0"}}`, likewise `audio_url` and `video_url`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_async.config import ChatConfig
from omni_async.errors import InvalidRequest
from omni_async.speech import resolve_voice

if TYPE_CHECKING:
    from numpy.typing import NDArray

Task = Literal["generate", "tokenize", "detokenize"]


class Chat(msgspec.Struct, kw_only=True, frozen=True):
    """Exactly one of `messages`, `prompt`, `prompt_token_ids` and `tokens` is given.

    `messages` are OpenAI's. `media` are the arrays that they name: images uint8 `[height, width, 3 or 4]`,
    audio float32 `[samples]` at 16 kHz, video uint8 `[frames, height, width, 3]`, whose frame rates
    `video_fps` has. `sampling` is for the first stage, `sampling_params_list` for each stage in order.
    `options` are of the prompt: `tools`, `chat_template_kwargs`, `add_generation_prompt` and the like.
    """

    model: str | None = None
    task: Task = "generate"
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    tokens: Sequence[int] | None = None
    media: Mapping[str, NDArray[Any]] = {}
    video_fps: Mapping[str, float] = {}
    modalities: tuple[str, ...] | None = None
    voice: str | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    sampling: Mapping[str, Any] = {}
    sampling_params_list: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = {}
    gapless: bool = True

    def outputs(self, pipeline: ChatConfig) -> tuple[str, ...]:
        """The stages whose output is wanted. Raises `InvalidRequest`, param `modalities`."""
        wanted = self.wanted(pipeline)
        for modality in wanted:
            if modality not in pipeline.modalities:
                known = ", ".join(pipeline.modalities)
                message = f"This model does not answer with {modality}; it answers with {known}."
                raise InvalidRequest(message, param="modalities")
        # What is said is always written too: it is the transcript.
        return tuple(dict.fromkeys(pipeline.modalities[modality] for modality in ("text", *wanted)))

    def wanted(self, pipeline: ChatConfig) -> tuple[str, ...]:
        """The modalities asked for, or the pipeline's default."""
        if self.task != "generate":
            return ("text",)
        if self.modalities is None:
            return pipeline.default_modalities
        if not self.modalities:
            raise InvalidRequest("modalities must name at least one.", param="modalities")
        return self.modalities

    def resolve(self, pipeline: ChatConfig, stages: Sequence[str]) -> dict[str, Any]:
        """The parameters for the stages, in their order. Raises `InvalidRequest` naming the field."""
        given = {
            name: getattr(self, name)
            for name in ("messages", "prompt", "prompt_token_ids", "tokens")
            if getattr(self, name) is not None
        }
        if len(given) != 1:
            raise InvalidRequest("A request has either messages, a prompt, or tokens.", param="messages")
        for name in self.media:
            kind = name.rstrip("0123456789")
            if kind not in pipeline.inputs:
                known = ", ".join(pipeline.inputs)
                raise InvalidRequest(f"This model does not take {kind}; it takes {known}.", param="messages")
        if len(self.sampling_params_list) > len(stages):
            count = len(self.sampling_params_list)
            message = f"sampling_params_list has {count} entries for {len(stages)} stages."
            raise InvalidRequest(message, param="sampling_params_list")
        params: dict[str, Any] = {
            **self.options,
            **given,
            "task": self.task,
            "sampling": self._sampling(stages),
        }
        if self.video_fps:
            params["video_fps"] = dict(self.video_fps)
        if self.outputs(pipeline) != (pipeline.modalities["text"],):
            params |= {"speaks": True, "voice": resolve_voice(self.voice, pipeline, "audio.voice")}
        elif self.voice is not None:
            raise InvalidRequest("A voice is for answers with audio.", param="audio.voice")
        return params

    def _sampling(self, stages: Sequence[str]) -> dict[str, dict[str, Any]]:
        each = {stage: dict(own) for stage, own in zip(stages, self.sampling_params_list, strict=False)}
        each[stages[0]] = {**self.sampling, **each.get(stages[0], {})}
        return each
