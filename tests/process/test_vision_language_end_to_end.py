"""A vision-language model of vLLM's as a pipeline of one stage: it writes what transformers writes."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image

from tests.process.test_omni_end_to_end import Conversation, client_of, picture
from tests.servers import Server, serve
from tests.tiny.omni import ENGINE, tiny_qwen25_vl

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
TOKENS = 16
CONVERSATIONS = [
    Conversation("hello"),
    Conversation("what is this?", (("image", picture(1)),)),
    Conversation("what is this?", (("image", picture(2)),)),
    Conversation("and these two?", (("image", picture(3)), ("image", picture(4)))),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(str(tiny_qwen25_vl()), "--stage-0-engine-extras", json.dumps(ENGINE)) as started:
        started.wait_ready()
        yield started


def told() -> list[str]:
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    folder = tiny_qwen25_vl()
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor: Any = AutoProcessor.from_pretrained(folder)
    answers = []
    for each in CONVERSATIONS:
        parts = [{"type": kind} for kind, _ in each.media]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": each.text}]}]
        text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images = [Image.open(io.BytesIO(data)) for _, data in each.media]
        inputs = processor(text=[text], images=images or None, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        answer = ids[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.tokenizer.decode(answer, skip_special_tokens=True).rstrip("\ufffd"))
    return answers


async def test_pictures_are_seen_as_transformers_sees_them(server: Server) -> None:
    expected = told()
    assert len(set(expected)) == len(expected), "equal answers would show nothing"
    async with client_of(server) as client:
        answers: list[Any] = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=str(tiny_qwen25_vl()), messages=each.messages(), temperature=0, max_tokens=TOKENS
                )
                for each in CONVERSATIONS
            )
        )
    assert [answer.choices[0].message.content for answer in answers] == expected
