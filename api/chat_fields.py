"""The fields of the chat and completion routes as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

AudioName = Literal["wav", "mp3", "flac", "opus", "aac", "pcm16", "pcm"]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0)]


class _Fields(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class TextPart(_Fields, kw_only=True, frozen=True, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class MediaUrl(_Fields, kw_only=True, frozen=True):
    """Where the media is: a data URL, or an address that the server may read. `detail` must be `auto`."""

    url: str
    detail: Literal["auto"] | None = None


class ImagePart(_Fields, kw_only=True, frozen=True, tag_field="type", tag="image_url"):
    """A picture."""

    image_url: MediaUrl


class AudioPart(_Fields, kw_only=True, frozen=True, tag_field="type", tag="audio_url"):
    """A sound."""

    audio_url: MediaUrl


class VideoPart(_Fields, kw_only=True, frozen=True, tag_field="type", tag="video_url"):
    """A film."""

    video_url: MediaUrl


class AudioData(_Fields, kw_only=True, frozen=True):
    """A sound file in base64, and what kind of file it is."""

    data: str
    format: str


class InputAudioPart(_Fields, kw_only=True, frozen=True, tag_field="type", tag="input_audio"):
    """A sound that is sent along."""

    input_audio: AudioData


Part = TextPart | ImagePart | AudioPart | VideoPart | InputAudioPart


class CalledFunction(_Fields, kw_only=True, frozen=True):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(_Fields, kw_only=True, frozen=True):
    """A call that the assistant made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class PastAudio(_Fields, kw_only=True, frozen=True):
    """An earlier answer's audio, by its id; the message's text is what was said."""

    id: str


class Message(_Fields, kw_only=True, frozen=True):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None


class AudioChoice(_Fields, kw_only=True, frozen=True):
    """How the answer is spoken. Streams default to pcm16, files to wav."""

    voice: str | None = None
    format: AudioName | None = None


class StreamOptions(_Fields, kw_only=True, frozen=True):
    """`include_usage` adds a last event with the usage and no choice."""

    include_usage: bool | None = None


class JsonSchema(_Fields, kw_only=True, frozen=True):
    """A schema that the answer keeps to. It is always kept to strictly."""

    name: str
    schema: dict[str, Any] = {}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(_Fields, kw_only=True, frozen=True):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Fields, kw_only=True, frozen=True):
    """vLLM's constraints: exactly one."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Function(_Fields, kw_only=True, frozen=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Fields, kw_only=True, frozen=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class SamplingFields(_Fields, kw_only=True, frozen=True):
    """How tokens are chosen; null is the model's own default. `seed` gives the same answer again."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    sampling_params_list: list[dict[str, Any]] | None = None


class ChatBody(SamplingFields, kw_only=True, frozen=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    modalities: list[Literal["text", "audio", "image"]] | None = None
    audio: AudioChoice | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingFields, kw_only=True, frozen=True):
    """The body of `POST /v1/completions`: one prompt as text or as tokens, or several."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None


class TokenizeBody(_Fields, kw_only=True, frozen=True):
    """The body of `POST /tokenize`: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(_Fields, kw_only=True, frozen=True):
    """The body of `POST /detokenize`."""

    tokens: list[TokenId]
    model: str | None = None
