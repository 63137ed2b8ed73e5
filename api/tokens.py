"""`POST /tokenize` and `POST /detokenize`: text to tokens and back, by the stage that has the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from omni_async.api.chat_fields import DetokenizeBody, TokenizeBody
from omni_async.api.chat_job import ChatService
from omni_async.api.chat_media import MediaRead, read_media
from omni_async.api.chat_messages import split_messages
from omni_async.api.exchange import WhileConnected, read_json, send_json
from omni_async.chat import Chat
from omni_async.errors import InvalidRequest, StageFailed
from omni_async.outputs import TextChunk

_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens, how many they are, and how many the model takes in all; `token_strs` where asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The text."""

    prompt: str


class TokenizeEndpoint:
    """An ASGI endpoint."""

    def __init__(self, service: ChatService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        service = self._service
        body = await read_json(scope, receive, service.config.max_body_bytes, _tokenize)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        async with WhileConnected(receive):
            messages, read = None, MediaRead({}, {})
            if body.messages is not None:
                messages, parts, _ = split_messages(body.messages)
                read = await read_media(parts, service.source, service.media, service.config)
            options = _options(body)
            chat = Chat(
                model=body.model,
                task="tokenize",
                prompt=body.prompt,
                messages=messages,
                media=read.arrays,
                video_fps=read.fps,
                options=options,
            )
            info = await _ask(service, chat, scope["request_id"])
        tokens = info["token_ids"]
        words = info["tokens"] if body.return_token_strs else None
        answer = Tokenized(
            count=len(tokens), max_model_len=info["max_model_len"], tokens=tokens, token_strs=words
        )
        await send_json(send, answer)


def _options(body: TokenizeBody) -> dict[str, Any]:
    for_messages = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
    options: dict[str, Any] = {}
    for name in ("add_special_tokens", *for_messages):
        value = getattr(body, name)
        if value is None:
            continue
        if (name in for_messages) != (body.messages is not None):
            raise InvalidRequest(f"{name} does not go with this.", param=name)
        options[name] = msgspec.to_builtins(value)
    return options


class DetokenizeEndpoint:
    """An ASGI endpoint."""

    def __init__(self, service: ChatService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = await read_json(scope, receive, self._service.config.max_body_bytes, _detokenize)
        async with WhileConnected(receive):
            chat = Chat(model=body.model, task="detokenize", tokens=body.tokens)
            info = await _ask(self._service, chat, scope["request_id"])
        await send_json(send, Detokenized(prompt=info["text"]))


async def _ask(service: ChatService, chat: Chat, request_id: str) -> Mapping[str, Any]:
    service.pipeline(chat.model)
    async with aclosing(service.omni.generate(chat, request_id=request_id)) as chunks:
        async for chunk in chunks:
            if isinstance(chunk, TextChunk):
                return chunk.info
    raise StageFailed("The model's tokenizer gave no answer.")
