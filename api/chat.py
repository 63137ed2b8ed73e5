"""`POST /v1/chat/completions`: a conversation continued in text and speech, whole or as events."""

from __future__ import annotations

import time
from base64 import b64encode
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from starlette.types import Receive, Scope, Send

from omni_async.api.chat_fields import ChatBody
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
from omni_async.errors import OmniError
from omni_async.ids import new_id

_decoder = msgspec.json.Decoder(ChatBody)
_encoder = msgspec.json.Encoder()
FinishReason = Literal["stop", "length", "tool_calls"]
AUDIO_SECONDS = 3600
"""How long OpenAI's clients may refer to an answer's audio. It is not kept here, so what they must send
again is its transcript."""


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function's name and (the next piece of) its arguments, JSON text."""

    arguments: str | None = None
    name: str | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool call, or in a stream a piece of call number `index`."""

    function: FunctionCall
    index: int | None = None
    id: str | None = None
    type: str | None = None


class AudioAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole audio file in base64, and what is said in it."""

    id: str
    data: str
    expires_at: int
    transcript: str


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The assistant's message. `content` is null where the answer is speech or tool calls alone."""

    content: str | None
    role: Literal["assistant"] | None = None
    reasoning: str | None = None
    audio: AudioAnswer | None = None
    tool_calls: list[Call] | None = None


class TopToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that might have been, its log probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopToken, frozen=True, kw_only=True):
    """A token of the answer, and those that were likeliest in its place."""

    top_logprobs: list[TopToken]


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of the answer's tokens, in order."""

    content: list[TokenLogprob]


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One of the n answers."""

    index: int
    message: AnswerMessage
    finish_reason: FinishReason
    logprobs: Logprobs | None = None


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    object: Literal["chat.completion"] = "chat.completion"


class ChatAudioDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The next piece of the audio file in base64, or of its transcript."""

    id: str
    data: str | None = None
    transcript: str | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    audio: ChatAudioDelta | None = None
    tool_calls: list[Call] | None = None


class DeltaChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of one answer; `finish_reason` stands in its last event alone."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None


class ChatEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream. The last one has the usage and no choice, where it was asked for."""

    id: str
    created: int
    model: str
    choices: list[DeltaChoice]
    usage: ChatUsage | None = None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ChatEndpoint:
    """An ASGI endpoint. The first piece is awaited before the head is sent, so early errors have a status."""

    def __init__(self, service: ChatService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = await read_json(scope, receive, self._service.config.max_body_bytes, _decoder)
        async with WhileConnected(receive):
            job = await self._service.prepare(body)
        request_id = scope["request_id"]
        if not body.stream:
            await _answer_whole(self._service, job, request_id, receive, send)
            return
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        await _answer_events(self._service, job, request_id, with_usage, receive, send)


class _Whole:
    """One answer, collected."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.audio: list[bytes] = []
        self.logprobs: list[TokenLogprob] = []
        self.reasoning = ""
        self.calls: dict[int, dict[str, Any]] = {}
        self.finish_reason: FinishReason = "stop"

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.audio.append(piece.audio)
        self.reasoning += piece.info.get("reasoning") or ""
        if found := logprobs_of(piece):
            self.logprobs.extend(found.content)
        for call in piece.info.get("tool_calls") or ():
            known = self.calls.setdefault(call["index"], {"arguments": ""})
            known |= {key: call[key] for key in ("id", "name") if call.get(key)}
            known["arguments"] += call.get("arguments") or ""
        self.finish_reason = piece.info.get("finish_reason") or self.finish_reason

    def choice(self, index: int, job: ChatJob) -> ChatChoice:
        text, audio = "".join(self.text), None
        if job.plan:
            data = b64encode(b"".join(self.audio)).decode()
            expires = int(time.time()) + AUDIO_SECONDS
            audio = AudioAnswer(id=f"audio-{new_id()}", data=data, expires_at=expires, transcript=text)
        calls = [
            Call(id=c["id"], type="function", function=FunctionCall(name=c["name"], arguments=c["arguments"]))
            for _, c in sorted(self.calls.items())
        ]
        shown = text if job.wants_text and (text or not calls) else None
        message = AnswerMessage(
            role="assistant",
            content=shown,
            reasoning=self.reasoning or None,
            audio=audio,
            tool_calls=calls or None,
        )
        logprobs = Logprobs(content=self.logprobs) if self.logprobs else None
        return ChatChoice(index=index, message=message, finish_reason=self.finish_reason, logprobs=logprobs)


async def _answer_whole(
    service: ChatService, job: ChatJob, request_id: str, receive: Receive, send: Send
) -> None:
    answers, tally = [_Whole() for _ in job.chats], Tally()
    async with WhileConnected(receive), aclosing(service.pieces(job, request_id)) as pieces:
        async for index, piece in pieces:
            answers[index].add(piece)
            tally.add(index, piece)
    answer = ChatAnswer(
        id=f"chatcmpl-{new_id()}",
        created=int(time.time()),
        model=job.model,
        choices=[each.choice(index, job) for index, each in enumerate(answers)],
        usage=tally.usage,
    )
    await send_json(send, answer)


async def _answer_events(
    service: ChatService, job: ChatJob, request_id: str, with_usage: bool, receive: Receive, send: Send
) -> None:
    events, tally = _Events(job), Tally()
    async with WhileConnected(receive), aclosing(service.pieces(job, request_id)) as pieces:
        first = await anext(pieces)
        await start_stream(send, b"text/event-stream; charset=utf-8", [(b"cache-control", b"no-cache")])
        try:
            for event in events.start():
                await send_piece(send, event)
            tally.add(*first)
            await send_piece(send, events.delta(*first))
            async for index, piece in pieces:
                tally.add(index, piece)
                if event := events.delta(index, piece):
                    await send_piece(send, event)
            for event in events.end():
                await send_piece(send, event)
            if with_usage:
                await send_piece(send, events.usage(tally.usage))
            await send_piece(send, b"data: [DONE]\n\n")
        except OmniError as error:
            await send_piece(send, _sse(ErrorBody(error=error_detail(error, request_id))))
    await end_stream(send)


class _Events:
    """The events of one stream."""

    def __init__(self, job: ChatJob) -> None:
        self._job = job
        self._id = f"chatcmpl-{new_id()}"
        self._created = int(time.time())
        self._audio = [f"audio-{new_id()}" for _ in job.chats]
        self._reasons: list[FinishReason] = ["stop" for _ in job.chats]

    def start(self) -> list[bytes]:
        return [self._event(index, Delta(role="assistant", content="")) for index in range(len(self._audio))]

    def delta(self, index: int, piece: Piece) -> bytes:
        """The event of a piece; empty when it has nothing to show."""
        self._reasons[index] = piece.info.get("finish_reason") or self._reasons[index]
        calls = [_call(call) for call in piece.info.get("tool_calls") or ()]
        reasoning = piece.info.get("reasoning")
        logprobs = logprobs_of(piece)
        if not (piece.text or piece.audio or calls or reasoning or logprobs):
            return b""
        delta = Delta(
            content=piece.text if piece.text and self._job.wants_text else None,
            reasoning=reasoning,
            audio=self._audio_delta(index, piece),
            tool_calls=calls or None,
        )
        return self._event(index, delta, logprobs=logprobs)

    def _audio_delta(self, index: int, piece: Piece) -> ChatAudioDelta | None:
        if not self._job.plan or not (piece.audio or piece.text):
            return None
        data = b64encode(piece.audio).decode() if piece.audio else None
        return ChatAudioDelta(id=self._audio[index], data=data, transcript=piece.text or None)

    def end(self) -> list[bytes]:
        return [self._event(i, Delta(), finish_reason=reason) for i, reason in enumerate(self._reasons)]

    def usage(self, usage: ChatUsage) -> bytes:
        return self._sse([], usage)

    def _event(self, index: int, delta: Delta, **more: Any) -> bytes:
        return self._sse([DeltaChoice(index=index, delta=delta, **more)], None)

    def _sse(self, choices: list[DeltaChoice], usage: ChatUsage | None) -> bytes:
        return _sse(
            ChatEvent(id=self._id, created=self._created, model=self._job.model, choices=choices, usage=usage)
        )


def _call(call: dict[str, Any]) -> Call:
    function = FunctionCall(name=call.get("name"), arguments=call.get("arguments"))
    kind = "function" if call.get("id") else None
    return Call(index=call["index"], id=call.get("id"), type=kind, function=function)


def logprobs_of(piece: Piece) -> Logprobs | None:
    """The piece's tokens with their log probabilities, where these were asked for."""
    found = piece.info.get("logprobs")
    if not found:
        return None
    return Logprobs(
        content=[
            TokenLogprob(
                **_token(each["token"], each["logprob"]),
                top_logprobs=[TopToken(**_token(*top)) for top in each["top"]],
            )
            for each in found
        ]
    )


def _token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": max(logprob, -9999.0), "bytes": list(token.encode())}


def _sse(value: Any) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"
