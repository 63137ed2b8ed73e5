"""Both stages of the built-in voice, driven directly: what one stage makes is handed to the next, without
an engine between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_async.config import StageConfig
from omni_async.stages.executor import Chunk, Executor, StageRequest, StepOutput, outputs_of
from omni_async.stages.models.hibari import code2wav, talker

Floats = NDArray[np.float32]


@dataclass
class Utterance:
    """A request, and the chunks of PCM that came of it."""

    text: str
    voice: str = "heart"
    seed: int = 1
    params: dict[str, Any] = field(default_factory=dict)
    chunks: list[Floats] = field(default_factory=list)

    def request(self) -> StageRequest:
        return StageRequest(0, {"text": self.text, "voice": self.voice, **self.params}, self.seed)

    @property
    def pcm(self) -> Floats:
        return np.concatenate(self.chunks)


@cache
def talker_stage() -> Executor:
    """One loaded talker for all tests."""
    return _loaded(talker.create(StageConfig(stage_id=0, name="talker", kind="talker")))


@cache
def code2wav_stage() -> Executor:
    """One loaded decoder for all tests."""
    return _loaded(code2wav.create(StageConfig(stage_id=1, name="code2wav", kind="code2wav")))


def _loaded(executor: Executor) -> Executor:
    executor.load()
    return executor


def talk(utterance: Utterance) -> list[StepOutput]:
    """All that the talker alone makes of it."""
    state = talker_stage().admit(utterance.request())
    outputs: list[StepOutput] = []
    while not (outputs and outputs[-1].final):
        outputs += outputs_of(talker_stage().step([state])[0])
    return outputs


def speak(*utterances: Utterance) -> list[Floats]:
    """Speak all of them together, in batches of all that are ready, to the end."""
    requests = [utterance.request() for utterance in utterances]
    talking = {i: talker_stage().admit(request) for i, request in enumerate(requests)}
    sounding = {i: code2wav_stage().admit(request) for i, request in enumerate(requests)}
    while sounding:
        for i, output in _step(talker_stage(), talking):
            sounding[i].inputs.append(Chunk("talker", output.meta, output.tensors, output.final))
        ready = {i: state for i, state in sounding.items() if state.ready}
        for i, output in _step(code2wav_stage(), ready):
            utterances[i].chunks.append(output.tensors["pcm"])
            if output.final:
                del sounding[i]
    return [utterance.pcm for utterance in utterances]


def _step(stage: Executor, states: dict[int, Any]) -> Sequence[tuple[int, StepOutput]]:
    """One step of all `states`; those that have ended are taken out."""
    rows = list(states)
    made = stage.step([states[i] for i in rows]) if rows else []
    outputs = [(i, output) for i, row in zip(rows, made, strict=True) for output in outputs_of(row)]
    for i, output in outputs:
        if output.final:
            del states[i]
    return outputs


def signal_to_noise(wanted: Floats, heard: Floats) -> float:
    """In dB; both of one length."""
    return float(10 * np.log10(np.mean(wanted**2) / np.mean((wanted - heard) ** 2)))
