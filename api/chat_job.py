"""A validated chat or completion request and its way to text and audio; the language routes share it."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec.structs import replace

from omni_async.api.chat_fields import ChatBody
from omni_async.api.chat_media import read_media
from omni_async.api.chat_messages import prompt_options, split_messages
from omni_async.api.client import OmniClient
from omni_async.api.config import ApiConfig
from omni_async.api.media_plan import MediaPlan, plan_media
from omni_async.api.media_pool import MediaPool
from omni_async.api.media_source import MediaSource
from omni_async.api.merge import merge
from omni_async.api.sampling import sampling_of
from omni_async.api.speech_fields import SpeechFields
from omni_async.chat import Chat
from omni_async.config import ChatConfig, PipelineConfig
from omni_async.errors import InvalidRequest, StageFailed
from omni_async.outputs import AudioChunk, TextChunk


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the prompt's tokens, those whose work an earlier request had done."""

    cached_tokens: int


class ChatUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the language model: the prompt's once, however many answers it got, and all answers'."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an answer: text, or bytes of its audio file. `info` is the stage's word on the text."""

    text: str = ""
    info: dict[str, Any] = {}
    audio: bytes = b""


class ChatJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the engine, one request an answer, and the file that their audio becomes."""

    chats: tuple[Chat, ...]
    model: str
    plan: MediaPlan | None = None
    wants_text: bool = True


class Tally:
    """Counts tokens as pieces pass."""

    def __init__(self) -> None:
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._completions: dict[int, int] = {}

    def add(self, index: int, piece: Piece, prompt: int = 0) -> None:
        """Note a piece of answer `index` to prompt number `prompt`."""
        if piece.info:
            self._prompts[prompt] = piece.info["prompt_tokens"]
            self._cached.setdefault(prompt, piece.info["cached_tokens"])
            self._completions[index] = piece.info["completion_tokens"]

    @property
    def usage(self) -> ChatUsage:
        """What was used so far."""
        prompt, made = sum(self._prompts.values()), sum(self._completions.values())
        return ChatUsage(
            prompt_tokens=prompt,
            completion_tokens=made,
            total_tokens=prompt + made,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(self._cached.values())),
        )


class ChatService:
    """Checks requests against what is served, and runs them."""

    def __init__(self, omni: OmniClient, config: ApiConfig, media: MediaPool) -> None:
        self.omni = omni
        self.config = config
        self.media = media
        self.source = MediaSource(config)

    def pipeline(self, model: str | None) -> tuple[PipelineConfig, ChatConfig]:
        """What converses. Raises `NotFound` or `InvalidRequest`."""
        pipeline = self.omni.pipeline_for("chat", model)
        if pipeline.chat is None:
            raise InvalidRequest(f"Model {pipeline.name!r} does not converse.", param="model")
        return pipeline, pipeline.chat

    async def prepare(self, body: ChatBody) -> ChatJob:
        """The job, its media read. Raises `InvalidRequest` or `NotFound` before any stage is asked."""
        pipeline, talks = self.pipeline(body.model)
        _refuse_tools(body, pipeline)
        messages, parts, names = split_messages(body.messages)
        _refuse_long(messages, self.config.max_input_chars)
        chat = Chat(
            model=pipeline.name,
            messages=messages,
            media=dict.fromkeys(names),  # type: ignore[arg-type]  # named here, read below
            modalities=None if body.modalities is None else tuple(body.modalities),
            voice=body.audio.voice if body.audio else None,
            sampling=sampling_of(body),
            sampling_params_list=body.sampling_params_list or (),
            options=prompt_options(body),
            gapless=bool(body.stream),
        )
        stages = [stage.name for stage in pipeline.stages]
        chat.resolve(talks, stages)
        wanted = chat.wanted(talks)
        plan = _plan(body, wanted, talks)
        read = await read_media(parts, self.source, self.media, self.config)
        chat = replace(chat, media=read.arrays, video_fps=read.fps)
        return ChatJob(
            chats=self.answers(chat, body.n, body.seed),
            model=body.model or pipeline.name,
            plan=plan,
            wants_text="text" in wanted,
        )

    def answers(self, chat: Chat, n: int | None, seed: int | None) -> tuple[Chat, ...]:
        """`n` requests whose seeds follow each other."""
        first = random.getrandbits(32) if seed is None else seed
        return tuple(replace(chat, seed=(first + i) % 2**63) for i in range(n or 1))

    async def pieces(self, job: ChatJob, request_id: str) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all answers as they are made; closing it cancels them all."""
        streams = [self._answer(chat, job.plan, request_id) for chat in job.chats]
        async with aclosing(merge(streams)) as merged:
            async for each in merged:
                yield each

    async def _answer(
        self, chat: Chat, plan: MediaPlan | None, request_id: str
    ) -> AsyncGenerator[Piece, None]:
        encoding = self.media.encoding(plan, streaming=chat.gapless) if plan else None
        finished = False
        try:
            async with aclosing(self.omni.generate(chat, request_id=request_id)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, TextChunk):
                        finished = finished or bool(chunk.info.get("finish_reason"))
                        yield Piece(text=chunk.text, info=dict(chunk.info))
                    elif (
                        isinstance(chunk, AudioChunk)
                        and encoding
                        and (data := await encoding.push(chunk.pcm))
                    ):
                        yield Piece(audio=data)
            if not finished and chat.task == "generate":
                raise StageFailed("The model's answer has no end.")
            if encoding and encoding.samples and (tail := await encoding.finish()):
                yield Piece(audio=tail)
        finally:
            if encoding:
                encoding.close()


def _plan(body: ChatBody, wanted: Sequence[str], talks: ChatConfig) -> MediaPlan | None:
    if "audio" not in wanted:
        if body.audio is not None:
            raise InvalidRequest("audio needs 'audio' among modalities.", param="audio")
        return None
    chosen = (body.audio and body.audio.format) or ("pcm16" if body.stream else "wav")
    fields = SpeechFields(response_format="pcm" if chosen == "pcm16" else chosen)
    return plan_media(fields, talks.sample_rate)


def _refuse_tools(body: ChatBody, pipeline: PipelineConfig) -> None:
    if not body.tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(body, name) not in (None, "none"):
                raise InvalidRequest(f"{name} needs tools.", param=name)
    elif body.tool_choice != "none" and not pipeline.stages[0].engine_extras.get("tool_call_parser"):
        message = "This model's tool calls are not read: its stage has no tool_call_parser."
        raise InvalidRequest(message, param="tools")


def _refuse_long(messages: Sequence[dict[str, Any]], limit: int) -> None:
    size = sum(map(_characters, messages))
    if size > limit:
        message = f"messages have {size} characters; at most {limit} are taken."
        raise InvalidRequest(message, param="messages", code="input_too_long")


def _characters(message: dict[str, Any]) -> int:
    content = message.get("content") or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.get("text", "")) for part in content)
