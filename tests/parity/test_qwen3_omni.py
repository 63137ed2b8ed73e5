"""Qwen3-Omni's talker and code2wav beside transformers' own `generate`, on the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from omni_async import models
from omni_async.config import StageConfig
from omni_async.errors import ConfigError, InvalidRequest, StageFailed
from omni_async.stages.executor import Chunk, StageRequest, StepOutput
from omni_async.stages.registry import create_executor
from tests.omni_reference import Reference, Spoken
from tests.tiny.omni import ID, tiny_qwen3_omni

pytestmark = pytest.mark.filterwarnings("ignore")
ANSWER = 12
FRAMES = 40
LONG = 110
"""A prompt of more positions than a slot of the cache has at first."""


def prompt_of(number: int) -> list[int]:
    words = [32 + (17 * number + 5 * i) % 90 for i in range(4 + 3 * number)]
    turn = [ID["im_start"], ID["user"], 10, *words, ID["im_end"], 10]
    return [
        ID["im_start"],
        ID["system"],
        10,
        65,
        ID["im_end"],
        10,
        *turn,
        ID["im_start"],
        ID["assistant"],
        10,
    ]


@pytest.fixture(scope="module")
def spoken() -> list[Spoken]:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    reference = Reference(Qwen3OmniMoeForConditionalGeneration, tiny_qwen3_omni())
    prompts = [torch.tensor([prompt_of(number)]) for number in (*range(6), LONG)]
    return [reference.speak({"input_ids": ids}, tokens=ANSWER, frames=FRAMES) for ids in prompts]


@pytest.fixture(scope="module")
def talker() -> Iterator[Any]:
    yield from loaded("talker")


def loaded(kind: str, checkpoint: Any = tiny_qwen3_omni, **extras: Any) -> Iterator[Any]:
    config = StageConfig(
        stage_id=1,
        name=kind,
        kind="ar" if kind == "talker" else kind,
        model=(model := str(checkpoint())),
        model_arch=models.find(model).folder or "",
        max_num_seqs=8,
        engine_extras=extras,
    )
    made = create_executor(config)
    made.load()
    yield made
    made.close()


def ask(number: int, seed: int = 0, **params: Any) -> StageRequest:
    params = {
        "voice": "Ethan",
        "temperature": 0.0,
        "repetition_penalty": 1.05,
        "max_tokens": FRAMES + 1,
        **params,
    }
    return StageRequest(request=number, params=params, seed=seed)


def chunks_of(each: Spoken, size: int = 1) -> list[Chunk]:
    """As the thinker sends them, `size` tokens at a time."""
    made = []
    for start in range(0, len(each.answer), size):
        meta: dict[str, Any] = {"token_ids": each.answer[start : start + size]}
        if not start:
            meta |= {"prompt_token_ids": each.prompt, "media": {}}
        made.append(Chunk("thinker", meta, {}, final=start + size >= len(each.answer)))
    return made


def run(
    executor: Any, asked: Sequence[tuple[StageRequest, Sequence[Chunk]]], *, stagger: int = 0
) -> list[list[StepOutput]]:
    """All outputs of each request. Request k joins after k * stagger steps; a chunk comes each step."""
    waiting, live = [(request, list(chunks)) for request, chunks in asked], []
    made: dict[int, list[StepOutput]] = {request.request: [] for request, _ in asked}
    for step in range(2000):
        while waiting and step >= stagger * (len(asked) - len(waiting)):
            request, chunks = waiting.pop(0)
            live.append((executor.admit(request), chunks))
        for state, chunks in live:
            if chunks:
                state.inputs.append(chunks.pop(0))
        ready = [state for state, _ in live if state.ready]
        for state, outputs in zip(ready, executor.step(ready), strict=True):
            assert not isinstance(outputs, Exception), outputs
            made[state.request.request].extend(outputs)
            if outputs and outputs[-1].final:
                live = [each for each in live if each[0] is not state]
        if not (waiting or live):
            return list(made.values())
    raise AssertionError("requests did not end")


def codes_of(outputs: Sequence[StepOutput]) -> Any:
    found = [output.tensors["codes"] for output in outputs if output.tensors]
    return np.concatenate(found, axis=1) if found else np.zeros((4, 0), np.int32)


@pytest.mark.parametrize("stagger", [0, 3])
def test_codes_are_those_of_the_reference_alone_and_in_company(
    talker: Any, spoken: list[Spoken], stagger: int
) -> None:
    asked = [(ask(i), chunks_of(each, 1 + i % 3)) for i, each in enumerate(spoken)]
    for each, outputs in zip(spoken, run(talker, asked, stagger=stagger), strict=True):
        np.testing.assert_array_equal(codes_of(outputs), each.codes)
        assert outputs[-1].final and sum(output.final for output in outputs) == 1
    assert len({each.codes.tobytes() for each in spoken}) == len(spoken)


def test_another_answer_makes_other_codes(talker: Any, spoken: list[Spoken]) -> None:
    each = spoken[3]
    other = each._replace(answer=[each.answer[0] ^ 1, *each.answer[1:]])
    (outputs,) = run(talker, [(ask(1), chunks_of(other))])
    assert codes_of(outputs).tobytes() != each.codes.tobytes()


def test_a_seed_gives_the_same_codes_alone_and_in_company(talker: Any, spoken: list[Spoken]) -> None:
    def sampled(number: int, seed: int) -> tuple[StageRequest, list[Chunk]]:
        return ask(number, seed, temperature=0.9, top_k=50), chunks_of(spoken[number])

    together = run(talker, [sampled(i, seed=i) for i in range(6)], stagger=2)
    alone = [run(talker, [sampled(i, seed=i)])[0] for i in range(6)]
    for one, other, greedy in zip(together, alone, spoken, strict=False):
        np.testing.assert_array_equal(codes_of(one), codes_of(other))
        assert codes_of(one).tobytes() != greedy.codes.tobytes()
    assert codes_of(run(talker, [sampled(0, seed=99)])[0]).tobytes() != codes_of(alone[0]).tobytes()


def test_an_aborted_request_gives_its_slot_back_and_its_neighbour_goes_on(
    talker: Any, spoken: list[Spoken]
) -> None:
    for number in range(20):
        state = talker.admit(ask(number))
        state.inputs.extend(chunks_of(spoken[number % 6]))
        talker.step([state])
        talker.abort(state)
    (outputs,) = run(talker, [(ask(1), chunks_of(spoken[1]))])
    np.testing.assert_array_equal(codes_of(outputs), spoken[1].codes)


def test_a_request_without_hidden_states_of_its_media_fails_alone(talker: Any, spoken: list[Spoken]) -> None:
    seeing = spoken[0]._replace(prompt=[ID["image_pad"] if i == 71 else i for i in prompt_of(2)])
    assert ID["image_pad"] in seeing.prompt
    bad, good = talker.admit(ask(1)), talker.admit(ask(2))
    bad.inputs.extend(chunks_of(seeing, 20))
    good.inputs.extend(chunks_of(spoken[2], 20))
    with pytest.raises(StageFailed, match="no hidden states"):
        talker.step([bad, good])
    with pytest.raises(StageFailed, match="no hidden states"):
        talker.step([bad])
    talker.abort(bad)
    outputs: list[StepOutput] = []
    while not (outputs and outputs[-1].final):
        outputs += talker.step([good])[0]
    np.testing.assert_array_equal(codes_of(outputs), spoken[2].codes)


def test_an_answer_of_one_token_has_nothing_to_say(talker: Any, code2wav: Any, spoken: list[Spoken]) -> None:
    (outputs,) = run(talker, [(ask(1), chunks_of(spoken[0]._replace(answer=[ID["im_end"]])))])
    ((final),) = outputs
    assert final.final and not final.tensors
    ((silence,),) = run(code2wav, [(ask(1), [Chunk("talker", {}, {}, final=True)])])
    assert silence.final and len(silence.tensors["pcm"]) == 0


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"voice": "Nobody"}, "audio.voice"),
        ({"temprature": 1.0}, "sampling_params_list"),
        ({"temperature": 9.0}, "sampling_params_list"),
        ({"top_k": -1}, "sampling_params_list"),
    ],
)
def test_what_a_talker_cannot_do_is_refused(talker: Any, params: dict[str, Any], param: str) -> None:
    request = StageRequest(request=1, params={"voice": "Ethan", **params}, seed=0, own=frozenset(params))
    if "voice" in params:
        request = StageRequest(request=1, params=params, seed=0)
    with pytest.raises(InvalidRequest) as caught:
        talker.admit(request)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("ar", {"engine_extras": {"dtyp": "auto"}}, "dtyp"),
        ("ar", {"engine_extras": {"dtype": "int8"}}, "dtype"),
        ("ar", {"default_sampling_params": {"temprature": 1.0}}, "Did you mean temperature"),
        ("code2wav", {"engine_extras": {"left_context": 0}}, "left_context"),
    ],
)
def test_a_setting_that_does_not_exist_ends_the_start(
    kind: str, fields: dict[str, Any], message: str
) -> None:
    config = StageConfig(
        stage_id=1, name="s", kind=kind, model=str(tiny_qwen3_omni()), model_arch="qwen3_omni", **fields
    )
    with pytest.raises(ConfigError, match=message):
        create_executor(config)


@pytest.fixture(scope="module")
def code2wav() -> Iterator[Any]:
    yield from loaded("code2wav")


def code_chunks(codes: Any, sizes: Sequence[int]) -> list[Chunk]:
    made, start = [], 0
    while start < codes.shape[1]:
        size = sizes[min(len(made), len(sizes) - 1)]
        end = start + size
        tensors = {"codes": codes[:, start:end].astype(np.int32)}
        made.append(Chunk("talker", {}, tensors, final=end >= codes.shape[1]))
        start = end
    return made


def sound_of(outputs: Sequence[StepOutput]) -> Any:
    return np.concatenate([output.tensors["pcm"] for output in outputs if output.tensors])


@pytest.mark.parametrize("sizes", [[1000], [4, 8, 16, 25], [1]])
def test_sound_is_that_of_the_reference_whole_and_in_chunks(
    code2wav: Any, spoken: list[Spoken], sizes: list[int]
) -> None:
    asked = [(ask(i), code_chunks(each.codes, sizes)) for i, each in enumerate(spoken)]
    for each, outputs in zip(spoken, run(code2wav, asked, stagger=2), strict=True):
        sound = sound_of(outputs)
        assert len(sound) == len(each.waveform)
        np.testing.assert_allclose(sound, each.waveform, atol=1e-5)
        assert np.std(each.waveform) > 0.01 and np.mean(np.abs(each.waveform) == 1) < 0.05
        assert outputs[-1].final and sum(output.final for output in outputs) == 1
    assert np.abs(spoken[0].waveform[:200] - spoken[1].waveform[:200]).max() > 0.05


def test_sound_without_its_left_context_differs(spoken: list[Spoken]) -> None:
    deaf = next(loaded("code2wav", left_context=1))
    (outputs,) = run(deaf, [(ask(1), code_chunks(spoken[5].codes, [5]))])
    assert np.abs(sound_of(outputs) - spoken[5].waveform).max() > 1e-3
