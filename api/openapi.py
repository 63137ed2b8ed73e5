"""`GET /openapi.json`: the interface described, its schemas made from the Structs that decode requests."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from omni_async.api.chat import ChatAnswer, ChatEvent
from omni_async.api.chat_fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from omni_async.api.completions import CompletionAnswer
from omni_async.api.echo import EchoAnswer, EchoBody
from omni_async.api.errors import ErrorBody
from omni_async.api.exchange import send_body
from omni_async.api.image_fields import ImageFields
from omni_async.api.images import ImageAnswer, ImageErrorEvent, ImageEvent
from omni_async.api.media_plan import FORMATS
from omni_async.api.ops import Alive, ModelList, Version, installed_version
from omni_async.api.session_messages import ClientMessage, ServerEvent
from omni_async.api.speech import AudioDelta, AudioEnd, AudioError
from omni_async.api.speech_batch import BatchAnswer
from omni_async.api.speech_fields import BatchBody, BatchItem, SpeechBody
from omni_async.api.tokens import Detokenized, Tokenized
from omni_async.api.voices import VoiceList
from omni_async.status import Health

_TEMPLATE = "#/components/schemas/{name}"
_REASONS = {
    400: "A field is wrong, unknown, or not supported by the model; `param` names it.",
    401: "No API key, or one that is not known.",
    403: "Not allowed.",
    404: "There is no such model, voice or route.",
    413: "The body is too large.",
    415: "The body is of another media type.",
    500: "A stage failed this request.",
    503: "Overloaded, or not ready; see Retry-After.",
    504: "The request's deadline passed.",
}
_WORK = (400, 401, 404, 413, 415, 500, 503, 504)
_SOCKET = (
    "WebSocket. Text frames from the client are `ClientMessage`s, text frames from the server are "
    "`ServerEvent`s, and the binary frames between `audio.start` and `audio.done` are one sentence's audio, "
    "a complete file of `response_format`. Close codes: 1000 done, 1003 bad frame type, 1008 key or "
    "time-out, 1009 too big, 1011 stage failure, 1013 overloaded."
)

Json = dict[str, Any]


class OpenApiEndpoint:
    """Serves the document, encoded once."""

    def __init__(self, *, has_echo: bool) -> None:
        self._body = msgspec.json.encode(openapi_document(has_echo=has_echo))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await send_body(send, self._body, b"application/json")


def openapi_document(*, has_echo: bool) -> Json:
    """The OpenAPI 3.1 document."""
    paths = {
        **_speech_paths(),
        **_voice_paths(),
        **_image_paths(),
        **_language_paths(),
        **_ops_paths(),
        **(_echo_paths() if has_echo else {}),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "omni_async", "version": installed_version()},
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _schemas() -> Json:
    types = (SpeechBody, BatchBody, BatchItem, BatchAnswer, AudioDelta, AudioEnd, AudioError, VoiceList)
    types += (ImageFields, ImageAnswer, ImageEvent, ImageErrorEvent)
    types += (ChatBody, ChatAnswer, ChatEvent, CompletionBody, CompletionAnswer)
    types += (TokenizeBody, Tokenized, DetokenizeBody, Detokenized)
    other = (ErrorBody, ModelList, Health, Alive, Version, EchoBody, EchoAnswer)
    _, schemas = msgspec.json.schema_components((*types, *other), ref_template=_TEMPLATE)
    for name, union in (("ClientMessage", ClientMessage), ("ServerEvent", ServerEvent)):
        (schema,), members = msgspec.json.schema_components((union,), ref_template=_TEMPLATE)
        schemas |= {**members, name: schema}
    schemas["BatchBody"]["properties"]["items"]["items"] = {"$ref": _TEMPLATE.format(name="BatchItem")}
    return {**schemas, "ImageForm": _image_form(schemas["ImageFields"])}


def _image_form(fields: Json) -> Json:
    """`ImageFields` with the images: one schema, as both together (allOf) refuse each other's fields."""
    file: Json = {"type": "string", "format": "binary"}
    texts: Json = {"type": "array", "items": {"type": "string"}}
    files: Json = {"type": "array", "items": file}
    form = {"image": files, "image[]": files, "url": texts, "url[]": texts, "mask_image": file, "mask": file}
    return {**fields, "title": "ImageForm", "properties": {**fields["properties"], **form}}


def _content(name: str, media_type: str = "application/json") -> Json:
    return {media_type: {"schema": {"$ref": _TEMPLATE.format(name=name)}}}


def _operation(summary: str, answer: Json, errors: tuple[int, ...], body: str | None = None) -> Json:
    responses: Json = {"200": {"description": "Success.", "content": answer}}
    for status in errors:
        responses[str(status)] = {"description": _REASONS[status], "content": _content("ErrorBody")}
    operation: Json = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _content(body)}
    return operation


def _speech_paths() -> Json:
    audio: Json = {
        rule.media_type: {"schema": {"type": "string", "format": "binary"}} for rule in FORMATS.values()
    }
    events = {"anyOf": [{"$ref": _TEMPLATE.format(name=n)} for n in ("AudioDelta", "AudioEnd", "AudioError")]}
    answer = {**audio, "text/event-stream": {"schema": events}}
    socket = {"summary": "Speak while text is typed", "description": _SOCKET}
    upgraded = {"101": {"description": "The connection is a WebSocket."}}
    batch = _operation("Speak several texts", _content("BatchAnswer"), _WORK, "BatchBody")
    return {
        "/v1/audio/speech": {"post": _operation("Speak a text", answer, _WORK, "SpeechBody")},
        "/v1/audio/speech/batch": {"post": batch},
        "/v1/audio/speech/stream": {"get": {**socket, "responses": upgraded}},
    }


def _voice_paths() -> Json:
    upload = _operation("Upload a voice", _content("VoiceList"), (400, 401, 413))
    del upload["responses"]["200"]
    upload["requestBody"] = {"content": {"multipart/form-data": {"schema": {"type": "object"}}}}
    delete = _operation("Delete an uploaded voice", {}, (401, 403, 404))
    del delete["responses"]["200"]
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "/v1/audio/voices": {
            "get": _operation("List the voices", _content("VoiceList"), (401,)),
            "post": upload,
        },
        "/v1/audio/voices/{name}": {"delete": {**delete, "parameters": [name]}},
    }


def _image_paths() -> Json:
    events = {"anyOf": [{"$ref": _TEMPLATE.format(name=name)} for name in ("ImageEvent", "ImageErrorEvent")]}
    answer = {**_content("ImageAnswer"), "text/event-stream": {"schema": events}}
    edit = _operation("Change images", answer, _WORK)
    edit["requestBody"] = {"required": True, "content": _content("ImageForm", "multipart/form-data")}
    draw = _operation("Draw pictures", answer, _WORK, "ImageFields")
    return {"/v1/images/generations": {"post": draw}, "/v1/images/edits": {"post": edit}}


def _language_paths() -> Json:
    events = {"text/event-stream": {"schema": {"$ref": _TEMPLATE.format(name="ChatEvent")}}}
    chat = _operation("Continue a conversation", {**_content("ChatAnswer"), **events}, _WORK, "ChatBody")
    events = {"text/event-stream": {"schema": {"$ref": _TEMPLATE.format(name="CompletionAnswer")}}}
    more = _operation("Continue a text", {**_content("CompletionAnswer"), **events}, _WORK, "CompletionBody")
    tokens = _operation("Text to tokens", _content("Tokenized"), _WORK, "TokenizeBody")
    text = _operation("Tokens to text", _content("Detokenized"), _WORK, "DetokenizeBody")
    return {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": more},
        "/tokenize": {"post": tokens},
        "/detokenize": {"post": text},
    }


def _ops_paths() -> Json:
    ready = _operation("Whether every stage takes work", _content("Health"), (401,))
    ready["responses"]["503"] = {"description": "Not ready, or draining.", "content": _content("Health")}
    text = {"text/plain": {"schema": {"type": "string"}}}
    document = {"application/json": {"schema": {"type": "object"}}}
    return {
        "/health": {"get": _operation("Whether the process runs", _content("Alive"), ())},
        "/health/ready": {"get": ready},
        "/v1/models": {"get": _operation("List the models", _content("ModelList"), (401,))},
        "/metrics": {"get": _operation("Prometheus metrics", text, (401,))},
        "/version": {"get": _operation("The server's version", _content("Version"), (401,))},
        "/openapi.json": {"get": _operation("This document", document, (401,))},
    }


def _echo_paths() -> Json:
    answer = {**_content("EchoAnswer"), "text/plain": {"schema": {"type": "string"}}}
    return {"/v1/echo": {"post": _operation("Send a text back", answer, _WORK, "EchoBody")}}
