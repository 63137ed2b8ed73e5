"""`POST /v1/completions`: texts or tokens continued, whole or as server-sent events."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from starlette.types import Receive, Scope, Send

from omni_async.api.chat_fields import CompletionBody
from omni_async.api.chat_job import ChatJob, ChatService, ChatUsage, Piece, Tally
from omni_async.api.errors import ErrorBody, error_detail
from omni_async.api.exchange import (
    WhileConnected,
    end_stream,
    read_json,
    send_json,
    send_piece,
    start_stream,
)
from omni_async.api.sampling import sampling_of
from omni_async.chat import Chat
from omni_async.errors import InvalidRequest, OmniError
from omni_async.ids import new_id

_decoder = msgspec.json.Decoder(CompletionBody)
_encoder = msgspec.json.Encoder()


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of the answer's tokens, in order; `text_offset` is where each begins in the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or in a stream what is new of it."""

    index: int
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    logprobs: CompletionLogprobs | None = None


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All answers: n to the first prompt, n to the second, …; or an event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: ChatUsage | None = None
    object: Literal["text_completion"] = "text_completion"


class CompletionsEndpoint:
    """An ASGI endpoint. The first piece is awaited before the head is sent, so early errors have a status."""

    def __init__(self, service: ChatService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = await read_json(scope, receive, self._service.config.max_body_bytes, _decoder)
        job = prepare(self._service, body)
        run = _Run(self._service, job, body, scope["request_id"])
        if body.stream:
            await run.answer_events(receive, send)
        else:
            await run.answer_whole(receive, send)


def prepare(service: ChatService, body: CompletionBody) -> ChatJob:
    """The job. Raises `InvalidRequest` or `NotFound` before any stage is asked."""
    pipeline, talks = service.pipeline(body.model)
    options = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}
    chats: list[Chat] = []
    for prompt in prompts_of(body, service.config.max_batch_items):
        chat = Chat(
            model=pipeline.name,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            modalities=("text",),
            sampling=sampling_of(body),
            sampling_params_list=body.sampling_params_list or (),
            options=options,
            gapless=bool(body.stream),
        )
        chat.resolve(talks, [stage.name for stage in pipeline.stages])
        chats.extend(service.answers(chat, body.n, body.seed))
    return ChatJob(chats=tuple(chats), model=body.model or pipeline.name)


def prompts_of(body: CompletionBody, limit: int) -> list[str | list[int]]:
    """The prompts, one by one. Raises `InvalidRequest` for a mixture."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [_checked(prompt)]
    if all(isinstance(each, int) for each in prompt):
        return [_checked([each for each in prompt if isinstance(each, int)])]
    if any(isinstance(each, int) for each in prompt):
        raise InvalidRequest("prompt mixes tokens with other prompts.", param="prompt")
    if len(prompt) > limit:
        raise InvalidRequest(f"prompt has {len(prompt)} entries; at most {limit} are taken.", param="prompt")
    return [_checked(each) for each in prompt if not isinstance(each, int)]


def _checked(prompt: str | list[int]) -> str | list[int]:
    if not prompt:
        raise InvalidRequest("prompt is empty.", param="prompt")
    return prompt


class _Run:
    """One request under way."""

    def __init__(self, service: ChatService, job: ChatJob, body: CompletionBody, request_id: str) -> None:
        self._service = service
        self._job = job
        self._request_id = request_id
        self._per_prompt = body.n or 1
        self._with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._id = f"cmpl-{new_id()}"
        self._created = int(time.time())
        self._tally = Tally()
        self._lengths = [0] * len(job.chats)

    async def answer_whole(self, receive: Receive, send: Send) -> None:
        """Everything at once."""
        pieces: list[list[Piece]] = [[] for _ in self._job.chats]
        service, job = self._service, self._job
        async with WhileConnected(receive), aclosing(service.pieces(job, self._request_id)) as stream:
            async for index, piece in stream:
                pieces[index].append(piece)
                self._count(index, piece)
        choices = [self._choice(index, each) for index, each in enumerate(pieces)]
        await send_json(send, self._answer(choices, self._tally.usage))

    async def answer_events(self, receive: Receive, send: Send) -> None:
        """Piece by piece."""
        service, job = self._service, self._job
        async with WhileConnected(receive), aclosing(service.pieces(job, self._request_id)) as stream:
            first = await anext(stream)
            headers = [(b"cache-control", b"no-cache")]
            await start_stream(send, b"text/event-stream; charset=utf-8", headers)
            try:
                await send_piece(send, self._event(*first))
                async for index, piece in stream:
                    await send_piece(send, self._event(index, piece))
                if self._with_usage:
                    await send_piece(send, _sse(self._answer([], self._tally.usage)))
                await send_piece(send, b"data: [DONE]\n\n")
            except OmniError as error:
                await send_piece(send, _sse(ErrorBody(error=error_detail(error, self._request_id))))
        await end_stream(send)

    def _event(self, index: int, piece: Piece) -> bytes:
        self._count(index, piece)
        return _sse(self._answer([self._choice(index, [piece])], None))

    def _count(self, index: int, piece: Piece) -> None:
        self._tally.add(index, piece, index // self._per_prompt)

    def _choice(self, index: int, pieces: list[Piece]) -> CompletionChoice:
        reasons = [piece.info.get("finish_reason") for piece in pieces]
        found = [each for piece in pieces for each in piece.info.get("logprobs") or ()]
        logprobs = self._logprobs(index, found) if found else None
        text = "".join(piece.text for piece in pieces)
        return CompletionChoice(index=index, text=text, finish_reason=reasons[-1], logprobs=logprobs)

    def _logprobs(self, index: int, found: list[dict[str, Any]]) -> CompletionLogprobs:
        offsets: list[int] = []
        for each in found:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(each["token"])
        return CompletionLogprobs(
            tokens=[each["token"] for each in found],
            token_logprobs=[max(each["logprob"], -9999.0) for each in found],
            top_logprobs=[{token: max(value, -9999.0) for token, value in each["top"]} for each in found],
            text_offset=offsets,
        )

    def _answer(self, choices: list[CompletionChoice], usage: ChatUsage | None) -> CompletionAnswer:
        return CompletionAnswer(
            id=self._id, created=self._created, model=self._job.model, choices=choices, usage=usage
        )


def _sse(value: Any) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"
