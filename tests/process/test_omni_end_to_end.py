"""Qwen3-Omni through its real server, in three processes: it writes and says what transformers does."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI
from PIL import Image

from omni_async.api.media_decoding import decode_audio, decode_video
from tests.media_files import film_file, sound_file
from tests.omni_reference import Reference, Spoken
from tests.servers import Server, poll_until, serve
from tests.tiny.omni import ENGINE, tiny_qwen3_omni

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
TOKENS = 16
FRAMES = 40
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": TOKENS,
    "extra_body": {"sampling_params_list": [{}, {"temperature": 0, "max_tokens": FRAMES + 1}]},
}
SPOKEN: dict[str, Any] = {
    "model": "qwen3-omni",
    "modalities": ["text", "audio"],
    "audio": {"voice": "Ethan", "format": "pcm16"},
    **GREEDY,
}


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (64, 48, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def sound(seed: int) -> bytes:
    return sound_file("wav", 0.6 + 0.2 * seed, 16000, 200.0 + 90 * seed)


def url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url("image/png", data)}}


def audio_part(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def video_part(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url("video/mp4", data)}}


PARTS = {"image": image_part, "audio": audio_part, "video": video_part}


class Conversation(NamedTuple):
    """What one user says: text, and media (kind, file) before it."""

    text: str
    media: tuple[tuple[str, bytes], ...] = ()

    def messages(self) -> list[Any]:
        """As a client sends them."""
        parts = [PARTS[kind](data) for kind, data in self.media]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}]

    def told_by(self, reference: Reference, frames: int = FRAMES) -> Spoken:
        """What the reference answers."""
        parts = [{"type": kind} for kind, _ in self.media]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": self.text}]}]
        return reference.answer(messages, tokens=TOKENS, frames=frames, **self._arrays())

    def _arrays(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for kind, data in self.media:
            if kind == "image":
                found.setdefault("images", []).append(Image.open(io.BytesIO(data)))
            elif kind == "audio":
                found.setdefault("audio", []).append(decode_audio(data, rate=16000, max_seconds=30))
            else:
                video = decode_video(data, max_frames=16, fps=2.0, max_pixels=10**6)
                found.setdefault("videos", []).append(video.frames)
                found["videos_kwargs"] = {"fps": video.fps}
        return found


CONVERSATIONS = [
    Conversation("hello"),
    Conversation("what is this?", (("image", picture(1)),)),
    Conversation("who speaks?", (("audio", sound(1)),)),
    Conversation("what happens?", (("video", film_file(50, (64, 48))),)),
    Conversation("two of them", (("image", picture(2)), ("image", picture(3)))),
    Conversation("all at once", (("image", picture(4)), ("audio", sound(2)))),
    Conversation("sing a song of it", (("audio", sound(3)),)),
    Conversation("a much longer question without any picture or sound at all"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(str(tiny_qwen3_omni()), "--stage-0-engine-extras", json.dumps(ENGINE)) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def told() -> list[Spoken]:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    reference = Reference(Qwen3OmniMoeForConditionalGeneration, tiny_qwen3_omni())
    return [each.told_by(reference) for each in CONVERSATIONS]


class Heard(NamedTuple):
    """An answer as its client has it; `pcm` float32 `[samples]`."""

    text: str
    pcm: Any
    finish_reasons: list[str]
    usage: Any


def client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


async def ask(client: AsyncOpenAI, messages: Sequence[Any], **fields: Any) -> Heard:
    answer: Any = await client.chat.completions.create(messages=list(messages), **{**SPOKEN, **fields})
    (choice,) = answer.choices
    assert choice.message.audio.transcript == choice.message.content
    data = base64.b64decode(choice.message.audio.data)
    return Heard(choice.message.content, pcm_of(data), [choice.finish_reason], answer.usage)


def pcm_of(data: bytes) -> Any:
    return np.frombuffer(data, "<i2").astype(np.float32) / 32767


async def ask_streamed(client: AsyncOpenAI, messages: Sequence[Any], **fields: Any) -> Heard:
    stream: Any = await client.chat.completions.create(
        messages=list(messages),
        stream=True,
        stream_options={"include_usage": True},
        **{**SPOKEN, **fields},
    )
    text, data, reasons, usages = "", b"", [], []
    async for event in stream:
        if event.usage:
            usages.append(event.usage)
        for choice in event.choices:
            text += choice.delta.content or ""
            if (audio := choice.delta.audio) and audio.data:
                data += base64.b64decode(audio.data)
            reasons += [choice.finish_reason] if choice.finish_reason else []
    (usage,) = usages
    return Heard(text, pcm_of(data), reasons, usage)


def check(heard: Heard, told: Spoken) -> None:
    assert heard.text == told.text.rstrip("\ufffd")
    assert len(heard.pcm) == len(told.waveform)
    np.testing.assert_allclose(heard.pcm, told.waveform, atol=1e-3)
    assert heard.finish_reasons == ["length" if len(told.answer) == TOKENS else "stop"]
    assert heard.usage.prompt_tokens == len(told.prompt)
    assert heard.usage.completion_tokens == len(told.answer)


async def test_eight_mixed_conversations_at_once_hear_what_transformers_says(
    server: Server, told: list[Spoken]
) -> None:
    assert len({each.waveform.tobytes() for each in told}) == len(told), "equal answers would show nothing"
    async with client_of(server) as client:
        whole = await asyncio.gather(*(ask(client, each.messages()) for each in CONVERSATIONS))
        streamed = await asyncio.gather(*(ask_streamed(client, each.messages()) for each in CONVERSATIONS))
    for one, other, expected in zip(whole, streamed, told, strict=True):
        check(one, expected)
        check(other, expected)


async def test_a_text_answer_never_runs_the_talker(server: Server, told: list[Spoken]) -> None:
    async with client_of(server) as client:
        before = await put_out(server)
        answer = await client.chat.completions.create(
            model="qwen3-omni", messages=CONVERSATIONS[1].messages(), modalities=["text"], **GREEDY
        )
        written = await put_out(server)
        await ask(client, CONVERSATIONS[1].messages())
        spoken = await put_out(server)
    assert answer.choices[0].message.content == told[1].text.rstrip("\ufffd")
    assert answer.choices[0].message.audio is None
    assert written == before
    assert all(spoken[stage] > written[stage] for stage in written)


async def put_out(server: Server) -> dict[str, float]:
    """Bytes that the stages behind the thinker have put out so far."""
    async with httpx.AsyncClient(base_url=server.url) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    return {
        stage: float(line.split()[-1])
        for line in lines
        for stage in ("talker", "code2wav")
        if line.startswith("omni_transfer_bytes_total{") and f'stage="{stage}"' in line
    }


async def test_seeds_give_the_same_words_and_sound_under_load(server: Server) -> None:
    sampled: dict[str, Any] = {
        "temperature": 1.0,
        "extra_body": {"sampling_params_list": [{}, {"temperature": 0.9, "max_tokens": 20}]},
    }
    async with client_of(server) as client:
        together = await asyncio.gather(
            *(ask(client, each.messages(), seed=i, **sampled) for i, each in enumerate(CONVERSATIONS))
        )
        for number in (0, 2, 5):
            alone = await ask(client, CONVERSATIONS[number].messages(), seed=number, **sampled)
            assert alone.text == together[number].text
            np.testing.assert_allclose(alone.pcm, together[number].pcm, atol=1e-3)
        other = await ask(client, CONVERSATIONS[0].messages(), seed=99, **sampled)
    assert other.pcm.tobytes() != together[0].pcm.tobytes()


async def test_a_corrupt_part_is_refused_and_its_neighbours_hear_all(
    server: Server, told: list[Spoken]
) -> None:
    broken = {
        "image": image_part(picture(1)[:200]),
        "audio": audio_part(b"RIFF" + bytes(60)),
        "video": video_part(film_file(20)[:300]),
    }
    bodies = [
        {"messages": [{"role": "user", "content": [part]}], "modalities": ["text", "audio"]}
        for part in broken.values()
    ]
    for body in bodies:
        body["audio"] = {"voice": "Ethan", "format": "wav"}
    unknown = {**bodies[0], "messages": [{"role": "user", "content": "x"}]}
    unknown["audio"] = {"voice": "Nobody", "format": "wav"}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http, client_of(server) as client:
        refused, heard = await asyncio.gather(
            asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in [*bodies, unknown])),
            asyncio.gather(*(ask(client, each.messages()) for each in CONVERSATIONS[:4])),
        )
    assert [each.status_code for each in refused] == [400] * 4, [each.text for each in refused]
    for one, expected in zip(heard, told, strict=False):
        check(one, expected)


@pytest.mark.parametrize("events", [1, 3, 9])
async def test_a_client_that_leaves_at_any_stage_frees_all_of_them(
    server: Server, told: list[Spoken], events: int
) -> None:
    async with client_of(server) as client:
        stream: Any = await client.chat.completions.create(
            model="qwen3-omni",
            messages=CONVERSATIONS[1].messages(),
            modalities=["text", "audio"],
            audio={"voice": "Ethan", "format": "pcm16"},  # type: ignore[typeddict-item]
            stream=True,
            temperature=0,
            max_tokens=400,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            events -= 1
            if not events:
                break
        await stream.close()
        poll_until(lambda: running(server) == [0, 0, 0], 10)
        check(await ask(client, CONVERSATIONS[1].messages()), told[1])


def running(server: Server) -> list[int]:
    stages = httpx.get(server.url + "/health/ready").json()["stages"]
    return [stage["running"] for stage in stages]


async def test_stage_after_stage_says_the_same(tmp_path: Path, told: list[Spoken]) -> None:
    folder = str(tiny_qwen3_omni())
    stages: list[dict[str, Any]] = [{"stage_id": number, "model": folder} for number in range(3)]
    stages[0]["engine_extras"] = ENGINE
    deploy = tmp_path / "deploy.yaml"
    deploy.write_text(json.dumps({"base_config": "qwen3_omni", "async_chunk": False, "stages": stages}))
    with serve("--deploy-config", str(deploy)) as sequential:
        sequential.wait_ready()
        async with client_of(sequential) as client:
            for number in (0, 5):
                check(await ask_streamed(client, CONVERSATIONS[number].messages()), told[number])
