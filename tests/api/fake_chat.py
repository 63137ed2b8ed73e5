"""A scripted conversation partner: it says a text token by token, and speaks it where audio is wanted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fake_omni import CHUNK, RATE, FakeOmni, tone

from omni_async.api.client import Chunk, Request
from omni_async.chat import Chat
from omni_async.config import ChatConfig, PipelineConfig, StageConfig
from omni_async.outputs import AudioChunk, TextChunk

TALKS = PipelineConfig(
    name="talks",
    aliases=("gpt-4o-audio-preview",),
    stages=(
        StageConfig(
            stage_id=0,
            name="thinker",
            kind="vllm",
            final_output=True,
            engine_extras={"tool_call_parser": "x"},
        ),
        StageConfig(stage_id=1, name="voice", kind="tone", inputs=("thinker",), final_output=True),
    ),
    chat=ChatConfig(
        modalities={"text": "thinker", "audio": "voice"},
        inputs=("image", "audio"),
        voices=("Ethan", "Chelsie"),
        default_voice="Ethan",
        voice_aliases={"alloy": "Chelsie"},
        sample_rate=RATE,
    ),
)
SAYS = "Hello there, you."
WORDS = re.findall(r"\s?[^\s]+", SAYS)


class FakeChat(FakeOmni):
    """`info` is added to what the language model says of each of its tokens, by their number."""

    def __init__(self) -> None:
        super().__init__(TALKS)
        self.info: dict[int, dict[str, Any]] = {}

    @property
    def chats(self) -> list[Chat]:
        return [seen.request for seen in self.seen if isinstance(seen.request, Chat)]

    def _chunks(self, request: Request, request_id: str) -> Sequence[Chunk]:
        assert isinstance(request, Chat) and TALKS.chat is not None
        request.resolve(TALKS.chat, ["thinker", "voice"])
        if request.task != "generate":
            info = {"token_ids": [1, 2], "tokens": ["a", "b"], "max_model_len": 9, "text": "ab"}
            return [TextChunk(request_id, "ab", info)]
        chunks: list[Chunk] = []
        speaks = "voice" in request.outputs(TALKS.chat)
        pcm = tone(SAYS)
        for number, word in enumerate(WORDS):
            info = {
                "token_ids": [number],
                "finish_reason": "stop" if number == len(WORDS) - 1 else None,
                "prompt_tokens": 7,
                "completion_tokens": number + 1,
                "cached_tokens": 4,
                **self.info.get(number, {}),
            }
            chunks.append(TextChunk(request_id, word, info))
            if speaks:
                chunks.append(AudioChunk(request_id, pcm[number * CHUNK : (number + 1) * CHUNK], RATE))
        if speaks:
            chunks.append(AudioChunk(request_id, pcm[len(WORDS) * CHUNK :], RATE))
        return chunks
