"""A language model through its real server: what it says is what transformers says, whoever else is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI

from tests.servers import Server, poll_until, serve
from tests.tiny.language import ENGINE, tiny_language_model

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
PROMPTS = [
    "hello",
    "the quick brown fox",
    "a tiny corpus",
    "lazy dog jumps",
    "world",
    "text of this",
    "over",
    "is",
]
TOKENS = 24


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    extras = json.dumps(ENGINE)
    with serve(str(tiny_language_model()), "--stage-0-engine-extras", extras) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What transformers answers to each prompt, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_language_model()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers: dict[str, str] = {}
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False
        )
        answers[prompt] = whole_signs(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


def whole_signs(text: str) -> str:
    """Without the beginning of a sign at the end, which vLLM does not show."""
    return text.rstrip("\ufffd")


def client_of(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0)


async def ask(client: AsyncOpenAI, prompt: str, **fields: Any) -> str:
    answer = await client.chat.completions.create(
        model="language-model",
        messages=[{"role": "user", "content": prompt}],
        **{"temperature": 0, "max_tokens": TOKENS, **fields},
    )
    return answer.choices[0].message.content or ""


async def ask_streamed(client: AsyncOpenAI, prompt: str) -> str:
    stream = await client.chat.completions.create(
        model="language-model",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=TOKENS,
        stream=True,
    )
    return "".join([event.choices[0].delta.content or "" async for event in stream])


async def test_eight_conversations_at_once_each_hear_what_transformers_says(
    server: Server, said: dict[str, str]
) -> None:
    assert len(set(said.values())) > 1, "equal answers would show nothing"
    async with client_of(server) as client:
        whole = await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS))
        streamed = await asyncio.gather(*(ask_streamed(client, prompt) for prompt in PROMPTS))
    assert [*map(whole_signs, whole)] == [*map(whole_signs, streamed)] == list(said.values())


async def test_a_seed_gives_the_same_answer_alone_and_in_company(server: Server) -> None:
    async with client_of(server) as client:
        together = await asyncio.gather(
            *(ask(client, prompt, temperature=1.0, seed=i) for i, prompt in enumerate(PROMPTS))
        )
        alone = [await ask(client, prompt, temperature=1.0, seed=i) for i, prompt in enumerate(PROMPTS)]
        other = await ask(client, PROMPTS[0], temperature=1.0, seed=99)
    assert together == alone and other != alone[0]


async def test_a_wrong_neighbour_gets_400_and_a_client_that_leaves_frees_its_place(
    server: Server, said: dict[str, str]
) -> None:
    bad: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "x " * 3000}]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5000},
        {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "((("}},
        {"messages": [{"role": "user", "content": "x"}], "sampling_params_list": [{"temprature": 1}]},
    ]
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http, client_of(server) as client:
        refused, good = await asyncio.gather(
            asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in bad)),
            asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS)),
        )
        assert [each.status_code for each in refused] == [400] * len(bad), [r.text for r in refused]
        assert [*map(whole_signs, good)] == list(said.values())
        stream = await client.completions.create(
            model="language-model",
            prompt="hello",
            max_tokens=480,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        await stream.close()
    poll_until(lambda: running(server) == 0, 10)


def running(server: Server) -> int:
    (stage,) = httpx.get(server.url + "/health/ready").json()["stages"]
    return stage["running"]


async def test_texts_continue_and_tokens_go_both_ways(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http, client_of(server) as client:
        tokens = (await http.post("/tokenize", json={"prompt": "the quick brown fox"})).json()
        text = (await http.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        by_text = await client.completions.create(
            model="language-model", prompt="the quick brown fox", temperature=0, max_tokens=9
        )
        by_token = await client.completions.create(
            model="language-model", prompt=tokens["tokens"], temperature=0, max_tokens=9
        )
    assert text == {"prompt": "the quick brown fox"} and tokens["max_model_len"] == ENGINE["max_model_len"]
    assert by_text.choices[0].text == by_token.choices[0].text
    assert by_text.usage is not None and by_text.usage.prompt_tokens == tokens["count"]


async def test_a_killed_worker_is_replaced_and_its_waiting_requests_answered(
    server: Server, said: dict[str, str]
) -> None:
    (worker,) = server.workers()
    async with client_of(server) as client:
        tasks = [asyncio.create_task(ask(client, prompt)) for prompt in PROMPTS]
        worker.kill()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    whole = {
        prompt: answer for prompt, answer in zip(PROMPTS, answers, strict=True) if isinstance(answer, str)
    }
    assert whole == {prompt: said[prompt] for prompt in whole}
    for answer in answers:
        assert isinstance(answer, str) or "thinker" in str(answer)
    server.wait_ready()
    async with client_of(server) as client:
        assert whole_signs(await ask(client, PROMPTS[0])) == said[PROMPTS[0]]
