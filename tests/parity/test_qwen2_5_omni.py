"""Qwen2.5-Omni's talker and token2wav beside transformers' own `generate`, on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from omni_async.errors import ConfigError, InvalidRequest, StageFailed
from omni_async.stages.executor import Chunk, StageRequest
from tests.omni_reference import Reference25, Spoken
from tests.parity.test_qwen3_omni import code_chunks, codes_of, loaded, prompt_of, run, sound_of
from tests.tiny.omni import tiny_qwen25_omni

pytestmark = pytest.mark.filterwarnings("ignore")
ANSWER = 12
CODES = 150
VOICES = ("Chelsie", "Ethan")


class Case(NamedTuple):
    """A conversation in the voice `VOICES[number % 2]`, with the noise of seed `number`."""

    number: int
    spoken: Spoken
    hidden: Any


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    reference = Reference25(tiny_qwen25_omni())
    made = []
    for number in range(6):
        ids = torch.tensor([prompt_of(number)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        spoken = reference.speak(inputs, tokens=ANSWER, frames=CODES, seed=number, speaker=VOICES[number % 2])
        made.append(Case(number, spoken, reference.hidden(spoken)))
    assert len({case.spoken.codes.tobytes() for case in made}) == len(made)
    return made


@pytest.fixture(scope="module")
def talker() -> Iterator[Any]:
    yield from loaded("talker", tiny_qwen25_omni)


@pytest.fixture(scope="module")
def whole() -> Iterator[Any]:
    yield from loaded("code2wav", tiny_qwen25_omni, chunk_blocks=[])


def ask(number: int, seed: int | None = None, **params: Any) -> StageRequest:
    params = {
        "voice": VOICES[number % 2],
        "temperature": 0.0,
        "repetition_penalty": 1.05,
        "max_tokens": CODES,
        **params,
    }
    return StageRequest(request=number, params=params, seed=number if seed is None else seed)


def chunks_of(case: Case, size: int = 1) -> list[Chunk]:
    """As the thinker sends them: a token comes with the hidden states of all before it."""
    made, sent = [], 0
    answer, prompt = case.spoken.answer, case.spoken.prompt
    for start in range(0, len(answer), size):
        end = min(start + size, len(answer))
        meta: dict[str, Any] = {"token_ids": answer[start:end]}
        if not start:
            meta |= {"prompt_token_ids": prompt, "media": {}}
        rows = case.hidden[sent : len(prompt) + end - 1]
        sent += len(rows)
        made.append(Chunk("thinker", meta, {"hidden": rows}, final=end == len(answer)))
    return made


@pytest.mark.parametrize("stagger", [0, 3])
def test_codes_are_those_of_the_reference_alone_and_in_company(
    talker: Any, cases: list[Case], stagger: int
) -> None:
    asked = [(ask(case.number), chunks_of(case, 1 + case.number % 3)) for case in cases]
    for case, outputs in zip(cases, run(talker, asked, stagger=stagger), strict=True):
        np.testing.assert_array_equal(codes_of(outputs), case.spoken.codes)
        assert outputs[-1].final and sum(output.final for output in outputs) == 1


def test_other_hidden_states_make_other_codes(talker: Any, cases: list[Case]) -> None:
    case = cases[3]
    (outputs,) = run(talker, [(ask(3), chunks_of(case._replace(hidden=-case.hidden)))])
    assert codes_of(outputs).tobytes() != case.spoken.codes.tobytes()


def test_a_seed_gives_the_same_codes_alone_and_in_company(talker: Any, cases: list[Case]) -> None:
    def sampled(case: Case, seed: int) -> tuple[StageRequest, list[Chunk]]:
        return ask(case.number, seed, temperature=0.9, top_k=40, top_p=0.8), chunks_of(case)

    together = run(talker, [sampled(case, case.number) for case in cases], stagger=2)
    for case, outputs in zip(cases, together, strict=True):
        (alone,) = run(talker, [sampled(case, case.number)])
        np.testing.assert_array_equal(codes_of(outputs), codes_of(alone))
    (other,) = run(talker, [sampled(cases[0], 99)])
    assert codes_of(other).tobytes() != codes_of(together[0]).tobytes()


def test_missing_hidden_states_fail_the_request(talker: Any, cases: list[Case]) -> None:
    state = talker.admit(ask(1))
    state.inputs.extend(chunks_of(cases[1]._replace(hidden=cases[1].hidden[:-1]), 20))
    (result,) = talker.step([state])
    assert isinstance(result, StageFailed) and "too few hidden states" in str(result)
    talker.abort(state)


@pytest.mark.parametrize("kind", ["talker", "code2wav"])
def test_a_voice_that_the_checkpoint_has_not_is_refused(talker: Any, whole: Any, kind: str) -> None:
    executor = talker if kind == "talker" else whole
    with pytest.raises(InvalidRequest, match="no voice 'Nobody'"):
        executor.admit(ask(1, voice="Nobody"))


@pytest.mark.parametrize("extras", [{"chunk_blocks": [0]}, {"left_blocks": 0}, {"chunks": [1]}])
def test_a_setting_that_does_not_exist_ends_the_start(extras: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(extras))):
        next(loaded("code2wav", tiny_qwen25_omni, **extras))


def test_an_answer_of_one_token_has_nothing_to_say(talker: Any, whole: Any, cases: list[Case]) -> None:
    case = cases[0]
    (outputs,) = run(talker, [(ask(0), chunks_of(case._replace(spoken=case.spoken._replace(answer=[258]))))])
    ((final),) = outputs
    assert final.final and not final.tensors
    ((silence,),) = run(whole, [(ask(0), [Chunk("talker", {}, {}, final=True)])])
    assert silence.final and len(silence.tensors["pcm"]) == 0


@pytest.mark.parametrize("sizes", [[1000], [12]])
def test_sound_of_whole_answers_is_that_of_the_reference(
    whole: Any, cases: list[Case], sizes: list[int]
) -> None:
    asked = [(ask(case.number), code_chunks(case.spoken.codes, sizes)) for case in cases]
    for case, outputs in zip(cases, run(whole, asked), strict=True):
        expected = case.spoken.waveform
        np.testing.assert_allclose(sound_of(outputs), expected, atol=1e-3)
        assert np.std(expected) > 0.01 and np.mean(np.abs(expected) == 1) < 0.05
    (other,) = run(whole, [(ask(1, seed=7), code_chunks(cases[1].spoken.codes, [1000]))])
    assert np.abs(sound_of(other) - cases[1].spoken.waveform).max() > 0.01


@pytest.fixture(scope="module")
def streamed() -> Iterator[Any]:
    yield from loaded("code2wav", tiny_qwen25_omni)


def test_streamed_sound_is_close_to_the_reference_and_does_not_depend_on_arrival(
    streamed: Any, cases: list[Case]
) -> None:
    """A block depends on all that follow, the less the farther: what the windows leave out is not heard."""
    runs = []
    for sizes, stagger in (([1000], 0), ([12], 2), ([5, 30, 1], 1)):
        asked = [(ask(case.number), code_chunks(case.spoken.codes, sizes)) for case in cases]
        runs.append(run(streamed, asked, stagger=stagger))
    for case, *outputs in zip(cases, *runs, strict=True):
        expected = case.spoken.waveform
        first, *others = map(sound_of, outputs)
        assert len(first) == len(expected)
        assert np.sqrt(np.mean((first - expected) ** 2)) < 0.005 * np.std(expected)
        np.testing.assert_allclose(first, expected, atol=0.01)
        for other in others:
            np.testing.assert_allclose(other, first, atol=1e-3)
    assert any(len(each) > 1 for each in runs[0])


def test_the_context_of_the_windows_counts(cases: list[Case]) -> None:
    case = cases[0]
    errors = []
    for blocks in (1, 4):
        executor = next(
            loaded("code2wav", tiny_qwen25_omni, chunk_blocks=[1], left_blocks=blocks, right_blocks=blocks)
        )
        (outputs,) = run(executor, [(ask(0), code_chunks(case.spoken.codes, [12]))])
        errors.append(np.abs(sound_of(outputs) - case.spoken.waveform).max())
    assert errors[1] < errors[0] / 2
