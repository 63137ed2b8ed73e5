"""Qwen2.5-Omni through its real server, in three processes: it writes and says what transformers does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from tests.omni_reference import Reference25, Spoken
from tests.process.test_omni_end_to_end import CONVERSATIONS, ask, ask_streamed, check, client_of
from tests.servers import Server, serve
from tests.tiny.omni import ENGINE, tiny_qwen25_omni

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
FRAMES = 40
CHELSIE: dict[str, Any] = {
    "model": "qwen2.5-omni",
    "audio": {"voice": "Chelsie", "format": "pcm16"},
    "seed": 0,
    "extra_body": {"sampling_params_list": [{}, {"temperature": 0, "max_tokens": FRAMES}]},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(str(tiny_qwen25_omni()), "--stage-0-engine-extras", json.dumps(ENGINE)) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def told() -> list[Spoken]:
    reference = Reference25(tiny_qwen25_omni())
    return [each.told_by(reference, frames=FRAMES) for each in CONVERSATIONS]


async def test_eight_mixed_conversations_at_once_hear_what_transformers_says(
    server: Server, told: list[Spoken]
) -> None:
    assert len({each.waveform.tobytes() for each in told}) == len(told), "equal answers would show nothing"
    async with client_of(server) as client:
        whole = await asyncio.gather(*(ask(client, each.messages(), **CHELSIE) for each in CONVERSATIONS))
        streamed = await asyncio.gather(
            *(ask_streamed(client, each.messages(), **CHELSIE) for each in CONVERSATIONS)
        )
    for one, other, expected in zip(whole, streamed, told, strict=True):
        check(one, expected)
        check(other, expected)


async def test_voice_and_seed_change_the_sound_and_an_unknown_voice_is_refused(
    server: Server, told: list[Spoken]
) -> None:
    messages = CONVERSATIONS[0].messages()
    async with client_of(server) as client:
        seeded = await ask(client, messages, **{**CHELSIE, "seed": 5})
        again = await ask(client, messages, **{**CHELSIE, "seed": 5})
        voiced = await ask(client, messages, **{**CHELSIE, "audio": {"voice": "Ethan", "format": "pcm16"}})
        with pytest.raises(openai.BadRequestError, match="Nobody"):
            await ask(client, messages, **{**CHELSIE, "audio": {"voice": "Nobody", "format": "pcm16"}})
    np.testing.assert_array_equal(seeded.pcm, again.pcm)
    for other in (seeded, voiced):
        assert other.text == told[0].text.rstrip("\ufffd")
        length = min(len(other.pcm), len(told[0].waveform))
        assert np.abs(other.pcm[:length] - told[0].waveform[:length]).max() > 0.01
