"""The talker stage: text → phonemes → frames of 12.5 ms, sentence by sentence.

`temperature` 0 is the package's own prosody, a sentence in one step; above 0 the autoregressive talker
samples it in steps of 25 ms, all such requests together. Either way the frames leave in slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from omni_async.config import StageConfig
from omni_async.errors import ConfigError, InvalidRequest
from omni_async.stages.executor import Executor, StageRequest, State, StepOutput
from omni_async.stages.models.hibari.frames import retimed_length
from omni_async.stages.models.hibari.package_model import load_graph, model_path
from omni_async.stages.models.hibari.phonemes import Phonemizer
from omni_async.stages.models.hibari.prosody import UNIT_FRAMES, Prosody
from omni_async.stages.models.hibari.sampler import SampledSentence, Sampler
from omni_async.stages.models.hibari.slices import SentenceSlices, Slice
from omni_async.stages.models.hibari.voices import VOICES

NATIVE_SPEED = (0.5, 2.0)
"""Where the package's own durations scale well (none is shorter than 25 ms); beyond, and in the sampled
talker always, frames are left out or repeated."""

SENTENCE_COST, SAMPLE_COST = 64, 1
"""A sentence in one piece takes about as long as this many sampled steps."""

SAMPLES_A_STEP = 4
"""Sampled steps in one step of the stage: enough that the loop around them does not count."""


class TalkerState(State):
    """A request's text, and the sentence that is being spoken."""

    def __init__(self, request: StageRequest, sentences: Iterator[list[int]]) -> None:
        super().__init__(request, has_upstream=False)
        params = request.params
        self.voice = VOICES[params["voice"]]
        self.speed = float(params.get("speed", 1.0))
        self.temperature = float(params.get("temperature", 0.0))
        self.generator = np.random.default_rng(request.seed)
        self._sentences = sentences
        self._upcoming: deque[list[int]] = deque()
        self.slices: SentenceSlices | None = None
        self.sampled: SampledSentence | None = None

    @property
    def cost(self) -> int:
        """In sampled steps."""
        return SENTENCE_COST if self.slices is None else SAMPLE_COST

    @property
    def native_speed(self) -> float:
        """What the package's durations are divided by; the rest of `speed` is retiming."""
        return min(max(self.speed, NATIVE_SPEED[0]), NATIVE_SPEED[1])

    def next_sentence(self) -> list[int] | None:
        """The phonemes of the sentence that follows, if there is one; the same until it is begun."""
        if not self._upcoming and (ids := next(self._sentences, None)) is not None:
            self._upcoming.append(ids)
        return self._upcoming[0] if self._upcoming else None

    def begin(self, sampled: SampledSentence | None) -> SentenceSlices:
        """The upcoming sentence is now the one being spoken."""
        self._upcoming.popleft()
        self.sampled = sampled
        self.slices = SentenceSlices()
        return self.slices


class TalkerExecutor:
    """Both talkers."""

    def __init__(self, device: str) -> None:
        self._device = device

    def load(self) -> None:
        """Load the networks and speak a sentence with each talker. Raises `ConfigError`."""
        torch.set_num_threads(1)
        self._prosody = Prosody(load_graph(model_path()), self._device)
        self._sampler = Sampler()
        self._phonemizer = Phonemizer()
        for temperature in (0.0, 1.0):
            params = {"text": "This warms up, zzyzx.", "voice": "heart", "temperature": temperature}
            state = self.admit(StageRequest(request=0, params=params, seed=0))
            while not any(output.final for output in self.step([state])[0]):
                pass

    def admit(self, request: StageRequest) -> TalkerState:
        """Raises `InvalidRequest` for an unknown voice; the text is looked at when it is spoken."""
        if request.params["voice"] not in VOICES:
            raise InvalidRequest(f"This model has no voice {request.params['voice']!r}.", param="voice")
        return TalkerState(request, self._phonemizer.sentences(request.params["text"]))

    def step(self, states: Sequence[TalkerState]) -> list[list[StepOutput]]:
        """Begin a sentence where one is wanted, advance the sampled ones, give a slice of each at hand."""
        for state in states:
            if state.slices is None:
                self._begin(state)
        self._sample([state for state in states if state.sampled is not None])
        for state in states:
            _look_ahead(state)
        slices = [_next_slice(state) for state in states]
        return [_output(state, piece) for state, piece in zip(states, slices, strict=True)]

    def _begin(self, state: TalkerState) -> None:
        """Speak the next sentence, or begin to sample it. A state is changed once that has succeeded."""
        ids = state.next_sentence()
        if ids is None:
            raise InvalidRequest("input has nothing to speak in it.", param="input")
        if state.temperature > 0:
            encoded = self._prosody.encode(ids)
            state.begin(SampledSentence(encoded, temperature=state.temperature))
            return
        frames = self._prosody.speak(ids, state.native_speed).pitched(state.voice.pitch)
        slices = state.begin(None)
        slices.add(frames.retimed(state.speed / state.native_speed))
        slices.complete = True

    def _sample(self, states: Sequence[TalkerState]) -> None:
        for _ in range(SAMPLES_A_STEP):
            rows = [(state, row) for state in states if (row := _unfinished(state)) is not None]
            if not rows:
                return
            self._sampler.step([row for _, row in rows], [state.generator for state, _ in rows])
            for state, row in rows:
                _collect(state, row)

    def abort(self, state: TalkerState) -> None:
        """Nothing is held outside the state."""

    def close(self) -> None:
        """Let the networks go."""
        del self._prosody, self._sampler


def _unfinished(state: TalkerState) -> SampledSentence | None:
    """The sentence if it must be sampled on before a slice can be given."""
    slices, sampled = state.slices, state.sampled
    return sampled if slices is not None and slices.missing > 0 else None


def _collect(state: TalkerState, row: SampledSentence) -> None:
    """Turn what was sampled into frames, once that makes a slice whole."""
    slices = state.slices
    assert slices is not None
    known = retimed_length(UNIT_FRAMES * row.steps, state.speed)
    if row.done or known - slices.added >= slices.missing:
        start = UNIT_FRAMES * row.taken
        slices.add(row.take_frames().pitched(state.voice.pitch).retimed(state.speed, start))
    slices.complete = row.done


def _look_ahead(state: TalkerState) -> None:
    """Find out what follows a sentence before its last slice is taken: that may raise, and then nothing
    has changed."""
    if state.slices is not None and state.slices.ends_with_slice:
        state.next_sentence()


def _next_slice(state: TalkerState) -> Slice | None:
    slices = state.slices
    return slices.take() if slices is not None and slices.missing <= 0 else None


def _output(state: TalkerState, piece: Slice | None) -> list[StepOutput]:
    if piece is None:
        return []
    if piece.last:
        state.slices = state.sampled = None
    arrays = {"frames": np.ascontiguousarray(piece.frames.values), "pitch": piece.frames.pitch}
    final = piece.last and state.next_sentence() is None
    return [StepOutput(tensors=arrays, meta={"first": piece.first, "last": piece.last}, final=final)]


def create(config: StageConfig) -> Executor:
    """The executor of a `talker` stage. Raises `ConfigError` for settings without effect."""
    if config.engine_extras:
        raise ConfigError(f"hibari's talker takes no engine_extras: {', '.join(config.engine_extras)}.")
    return TalkerExecutor(config.devices[0])
