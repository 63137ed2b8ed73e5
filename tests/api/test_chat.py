"""The chat, completion and token routes over a scripted engine: the openai client, and what is refused."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from fake_chat import SAYS, WORDS, FakeChat
from fake_omni import Gate, failing, tone
from PIL import Image as Pillow
from serving import decode, serve

from omni_async.api.app import create_app
from omni_async.api.audio_encoder import to_int16
from omni_async.api.config import ApiConfig
from omni_async.errors import InvalidRequest, Overloaded, StageFailed

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@asynccontextmanager
async def talking(omni: FakeChat, **limits: Any) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with (
        serve(create_app(omni, ApiConfig(**limits))) as address,
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client


async def post(client: openai.AsyncOpenAI, path: str, body: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=str(client.base_url).removesuffix("/v1/")) as http:
        return await http.post(path, json=body)


def png() -> str:
    file = io.BytesIO()
    Pillow.fromarray(np.full((4, 6, 3), 200, np.uint8)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def test_a_whole_answer_has_text_speech_and_usage() -> None:
    omni = FakeChat()
    async with talking(omni) as client:
        answer = await client.chat.completions.create(
            model="talks",
            messages=MESSAGES,
            modalities=["text", "audio"],
            audio={"voice": "alloy", "format": "mp3"},
        )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop" and choice.message.content == SAYS
    assert choice.message.audio is not None and choice.message.audio.transcript == SAYS
    samples, rate = decode(base64.b64decode(choice.message.audio.data))
    assert rate == 24000 and len(samples) == len(tone(SAYS))
    assert answer.usage is not None and answer.usage.prompt_tokens == 7
    assert answer.usage.completion_tokens == len(WORDS) and answer.usage.total_tokens == 7 + len(WORDS)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert omni.chats[0].voice == "alloy" and not omni.chats[0].gapless


async def test_text_and_audio_deltas_interleave_and_end_once() -> None:
    omni, gate = FakeChat(), Gate(open=2)
    omni.before_chunk = gate
    async with talking(omni) as client:
        stream = await client.chat.completions.create(
            model="talks",
            messages=MESSAGES,
            modalities=["text", "audio"],
            audio={"voice": "Ethan", "format": "pcm16"},
            stream=True,
            stream_options={"include_usage": True},
        )
        events = []
        async for event in stream:
            events.append(event)
            audio: Any = getattr(event.choices[0].delta, "audio", None) if event.choices else None
            if audio and audio.data and omni.seen[0].chunks == 2:
                gate.release()
    deltas = [event.choices[0].delta for event in events if event.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == SAYS
    audio = [delta.audio for delta in deltas if getattr(delta, "audio", None)]
    pcm = b"".join(base64.b64decode(each.data) for each in audio if each.data)
    assert pcm == to_int16(tone(SAYS)).tobytes()
    assert "".join(each.transcript or "" for each in audio) == SAYS
    assert len({each.id for each in audio}) == 1
    kinds = ["data" if each.data else "text" for each in audio]
    assert kinds[:4] == ["text", "data", "text", "data"]
    reasons = [event.choices[0].finish_reason for event in events if event.choices]
    assert reasons.count("stop") == 1 and reasons[-1] == "stop"
    usages = [event.usage for event in events if event.usage]
    assert len(usages) == 1 and usages[0].total_tokens == 7 + len(WORDS) and not events[-1].choices


async def test_text_alone_never_asks_for_the_voice() -> None:
    omni = FakeChat()
    async with talking(omni) as client:
        answer = await client.chat.completions.create(model="talks", messages=MESSAGES, modalities=["text"])
        spoken = await client.chat.completions.create(model="talks", messages=MESSAGES, modalities=["audio"])
    assert answer.choices[0].message.audio is None
    assert spoken.choices[0].message.content is None
    assert spoken.choices[0].message.audio is not None
    assert spoken.choices[0].message.audio.transcript == SAYS
    from fake_chat import TALKS

    assert TALKS.chat is not None
    assert [chat.outputs(TALKS.chat) for chat in omni.chats] == [("thinker",), ("thinker", "voice")]


async def test_n_answers_have_seeds_that_follow_each_other_and_one_prompt() -> None:
    omni = FakeChat()
    async with talking(omni) as client:
        answer = await client.chat.completions.create(model="talks", messages=MESSAGES, n=3, seed=0)
        events = [
            event
            async for event in await client.chat.completions.create(
                model="talks", messages=MESSAGES, n=2, stream=True
            )
        ]
    assert [chat.seed for chat in omni.chats[:3]] == [0, 1, 2]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3 * len(WORDS))
    ended = [c.index for event in events for c in event.choices if c.finish_reason]
    assert sorted(ended) == [0, 1]


async def test_every_sampling_field_reaches_the_stage() -> None:
    omni = FakeChat()
    fields: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.5,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "stop": ["x"],
        "logit_bias": {"5": 1.0},
    }
    extra: dict[str, Any] = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [4]}
    extra |= {"ignore_eos": True, "min_tokens": 1, "bad_words": ["y"], "allowed_token_ids": [1]}
    extra |= {"sampling_params_list": [{"top_k": 9}, {"temperature": 0.3}]}
    async with talking(omni) as client:
        await client.chat.completions.create(
            model="talks", messages=MESSAGES, max_completion_tokens=5, **fields, extra_body=extra
        )
    chat = omni.chats[0]
    expected = {**fields, **extra, "max_tokens": 5}
    del expected["sampling_params_list"]
    assert dict(chat.sampling) == expected
    from fake_chat import TALKS

    assert TALKS.chat is not None
    params = chat.resolve(TALKS.chat, ["thinker", "voice"])
    assert params["sampling"] == {"thinker": {**expected, "top_k": 9}, "voice": {"temperature": 0.3}}


async def test_structured_answers_and_tools_are_passed_on() -> None:
    omni = FakeChat()
    omni.info[1] = {"tool_calls": [{"index": 0, "id": "c1", "name": "look", "arguments": '{"a'}], "text": ""}
    omni.info[2] = {"tool_calls": [{"index": 0, "id": None, "name": None, "arguments": '": 1}'}]}
    omni.info[2] |= {"finish_reason": "tool_calls", "reasoning": "hm"}
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    async with talking(omni) as client:
        answer = await client.chat.completions.create(
            model="talks", messages=MESSAGES, tools=tools, tool_choice="required", modalities=["text"]
        )
        events = [
            event
            async for event in await client.chat.completions.create(
                model="talks", messages=MESSAGES, tools=tools, stream=True, modalities=["text"]
            )
        ]
        schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
        await client.chat.completions.create(model="talks", messages=MESSAGES, response_format=schema)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.id, call.function.name, json.loads(call.function.arguments)) == ("c1", "look", {"a": 1})
    assert answer.choices[0].finish_reason == "tool_calls"
    deltas = [each for e in events for c in e.choices for each in c.delta.tool_calls or ()]
    assert "".join(each.function.arguments or "" for each in deltas if each.function) == '{"a": 1}'
    assert [c.finish_reason for e in events for c in e.choices if c.finish_reason] == ["tool_calls"]
    assert omni.chats[0].options["tool_choice"] == "required" and omni.chats[0].options["tools"] == tools
    assert omni.chats[2].sampling["structured_outputs"] == {"json": {"type": "object"}}


async def test_log_probabilities_come_with_their_tokens() -> None:
    omni = FakeChat()
    omni.info[0] = {"logprobs": [{"token": "Hé", "logprob": -0.5, "top": [("Hé", -0.5), ("x", -2.0)]}]}
    async with talking(omni) as client:
        answer = await client.chat.completions.create(
            model="talks", messages=MESSAGES, logprobs=True, top_logprobs=2
        )
        text = await client.completions.create(model="talks", prompt="Hello", logprobs=2)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
    (token,) = answer.choices[0].logprobs.content
    assert (token.token, token.logprob, token.bytes) == ("Hé", -0.5, [72, 195, 169])
    assert [top.token for top in token.top_logprobs] == ["Hé", "x"]
    assert omni.chats[0].sampling["logprobs"] == 2
    assert text.choices[0].logprobs is not None and text.choices[0].logprobs.tokens == ["Hé"]


async def test_media_become_arrays_that_the_messages_name() -> None:
    omni = FakeChat()
    content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": png()}}]
    async with talking(omni) as client:
        await client.chat.completions.create(
            model="talks",
            messages=[{"role": "user", "content": content * 2}],  # type: ignore[list-item]
        )
    chat = omni.chats[0]
    assert {name: array.shape for name, array in chat.media.items()} == {
        "image0": (4, 6, 3),
        "image1": (4, 6, 3),
    }
    assert chat.messages is not None
    urls = [part["image_url"]["url"] for part in chat.messages[0]["content"] if part["type"] == "image_url"]
    assert urls == ["omni:image0", "omni:image1"]


async def test_completions_take_texts_and_tokens() -> None:
    omni = FakeChat()
    async with talking(omni) as client:
        two = await client.completions.create(model="talks", prompt=["a", "b"], n=2, seed=4)
        tokens = await client.completions.create(model="talks", prompt=[1, 2, 3])
        stream = await client.completions.create(
            model="talks", prompt="a", stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
    assert [(c.index, c.text, c.finish_reason) for c in two.choices] == [(i, SAYS, "stop") for i in range(4)]
    assert [chat.prompt for chat in omni.chats[:4]] == ["a", "a", "b", "b"]
    assert [chat.seed for chat in omni.chats[:4]] == [4, 5, 4, 5]
    assert two.usage is not None and two.usage.prompt_tokens == 14
    assert tokens.choices[0].text == SAYS and omni.chats[4].prompt_token_ids == [1, 2, 3]
    assert "".join(c.text for event in events for c in event.choices) == SAYS
    assert [c.finish_reason for e in events for c in e.choices if c.finish_reason] == ["stop"]
    assert events[-1].usage is not None and events[-1].choices == []


async def test_text_goes_to_tokens_and_back() -> None:
    omni = FakeChat()
    async with talking(omni) as client:
        made = await post(client, "/tokenize", {"prompt": "ab", "return_token_strs": True})
        chat = await post(client, "/tokenize", {"messages": MESSAGES, "add_generation_prompt": False})
        text = await post(client, "/detokenize", {"tokens": [1, 2]})
        wrong = await post(client, "/tokenize", {"prompt": "ab", "messages": MESSAGES})
        odd = await post(client, "/tokenize", {"prompt": "ab", "add_generation_prompt": True})
    assert made.json() == {"count": 2, "max_model_len": 9, "tokens": [1, 2], "token_strs": ["a", "b"]}
    assert chat.json()["count"] == 2 and omni.chats[1].options == {"add_generation_prompt": False}
    assert text.json() == {"prompt": "ab"}
    assert wrong.status_code == 400 and odd.status_code == 400
    assert odd.json()["error"]["param"] == "add_generation_prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"modalities": ["image"]}, "modalities"),
        ({"modalities": []}, "modalities"),
        ({"audio": {"voice": "Ethan"}, "modalities": ["text"]}, "audio.voice"),
        ({"audio": {"format": "wav"}, "modalities": ["text"]}, "audio"),
        ({"audio": {"voice": "nobody"}, "modalities": ["audio"]}, "audio.voice"),
        ({"audio": {"format": "midi"}, "modalities": ["audio"]}, "audio.format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"the": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"sampling_params_list": [{}, {}, {}]}, "sampling_params_list"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"user": "me"}, "user"),
        ({"model": "tone"}, "model"),
    ],
)
async def test_a_wrong_field_is_named_before_a_stage_is_asked(fields: dict[str, Any], param: str) -> None:
    omni = FakeChat()
    async with talking(omni) as client:
        answer = await post(client, "/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert answer.status_code == (404 if "model" in fields else 400), answer.text
    assert answer.json()["error"]["param"] == param
    assert not omni.seen


@pytest.mark.parametrize(
    ("part", "at"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, ".image_url"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}, ".image_url"),
        ({"type": "image_url", "image_url": {"url": png(), "detail": "low"}}, ".image_url.detail"),
        ({"type": "input_audio", "input_audio": {"data": "????", "format": "wav"}}, ".input_audio"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, ".input_audio"),
        ({"type": "picture", "url": "x"}, ".type"),
        ({"type": "file", "file": {}}, ".type"),
    ],
)
async def test_a_bad_media_part_is_named_and_its_neighbour_answered(part: dict[str, Any], at: str) -> None:
    omni = FakeChat()
    async with talking(omni) as client:
        body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]}
        answer = await post(client, "/v1/chat/completions", body)
        good = await client.chat.completions.create(model="talks", messages=MESSAGES)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"messages[0].content[1]{at}"
    assert good.choices[0].message.content == SAYS
    assert len(omni.seen) == 1


async def test_a_kind_of_media_that_the_model_does_not_take_is_refused_unread() -> None:
    omni = FakeChat()
    part = {"type": "video_url", "video_url": {"url": "http://nowhere.invalid/film.mp4"}}
    async with talking(omni) as client:
        body = {"messages": [{"role": "user", "content": [part]}]}
        answer = await post(client, "/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "This model does not take video; it takes image, audio."


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("The prompt is too long.", param="messages"), 400),
        (Overloaded("Full.", retry_after=3), 503),
        (StageFailed("Stage thinker failed."), 500),
    ],
)
async def test_an_early_failure_has_its_status_and_a_late_one_its_event(
    error: Any, status: int, n: int
) -> None:
    omni = FakeChat()
    async with talking(omni) as client:
        omni.before_chunk = failing(error)
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="talks", messages=MESSAGES, stream=True, n=n)
        assert caught.value.status_code == status
        omni.before_chunk = failing(error, after=2)
        stream = await client.chat.completions.create(model="talks", messages=MESSAGES, stream=True, n=n)
        events: list[Any] = []
        with pytest.raises(openai.APIError, match=str(error)):
            await collect(stream, events)
    assert events and not any(choice.finish_reason for event in events for choice in event.choices)


async def collect(stream: Any, events: list[Any]) -> None:
    async for event in stream:
        events.append(event)


async def test_a_client_that_leaves_cancels_all_its_answers() -> None:
    omni = FakeChat()
    omni.before_chunk = Gate(open=2)
    async with talking(omni) as client:
        stream = await client.chat.completions.create(model="talks", messages=MESSAGES, stream=True, n=2)
        await anext(aiter(stream))
        await stream.close()
        for seen in omni.seen:
            await seen.ended.wait()
    assert [seen.outcome for seen in omni.seen] == ["abort", "abort"]


async def test_what_the_model_would_refuse_late_is_counted_before() -> None:
    omni = FakeChat()
    async with talking(omni, max_input_chars=10) as client:
        answer = await post(
            client, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 11}]}
        )
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "input_too_long"
