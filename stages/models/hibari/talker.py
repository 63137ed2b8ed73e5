"""The talker stage: text → phonemes → frames of 12.5 ms, sentence by sentence.

`temperature` 0 is the package's own prosody, a sentence in one step; above 0 the autoregressive talker
samples it in steps of 25 ms. Either way the frames leave in slices whose sizes depend on their position
alone, so that what the decoder makes of them does not depend on load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from omni_async.config import StageConfig
from omni_async.errors import ConfigError, InvalidRequest
from omni_async.stages.executor import Executor, StageRequest, State, StepOutput
from omni_async.stages.models.hibari.autoregressive import (
    Autoregressive,
    SpokenSentence,
    decode_energy,
    decode_pitch,
)
from omni_async.stages.models.hibari.decoder import LOOKAHEAD
from omni_async.stages.models.hibari.phonemes import Phonemizer
from omni_async.stages.models.hibari.prosody import FRAME_CHANNELS, Prosody, make_frames
from omni_async.stages.models.hibari.voices import VOICES
from omni_async.stages.models.hibari.weights import load_prosody

AR_WEIGHTS = Path(__file__).parent / "weights" / "talker.safetensors"

SLICES = (20 + LOOKAHEAD, 80)
"""Frames of a sentence's first slices; the first lets the decoder make a quarter of a second."""

SLICE = 160
"""Frames of every later slice: 2 s of audio."""

NATIVE_SPEED = (0.5, 2.0)
"""Where the package's own durations scale well; beyond, frames are repeated or left out."""

LONGEST_FACTOR = 2.0
"""A sampled sentence may take twice as long as the predicted one, and a second."""

Encoded = tuple[Tensor, Tensor, Tensor]


class Sentence:
    """Frames [F, 130] and pitch [F] of a sentence as far as they are known, given out in slices."""

    def __init__(self, *, total: int | None) -> None:
        self.frames = torch.zeros(0, FRAME_CHANNELS)
        self.pitch = torch.zeros(0)
        self.total = total
        self.complete = False
        self.given = 0
        self.slices = 0

    def add(self, frames: Tensor, pitch: Tensor) -> None:
        """More of it."""
        self.frames = torch.cat([self.frames, frames])
        self.pitch = torch.cat([self.pitch, pitch])

    @property
    def wanted(self) -> int:
        """Frames of the next slice."""
        return SLICES[self.slices] if self.slices < len(SLICES) else SLICE

    @property
    def has_slice(self) -> bool:
        """Whether the next slice is at hand."""
        return self.complete or len(self.frames) - self.given >= self.wanted

    @property
    def ends_with_slice(self) -> bool:
        """Whether the next slice is the last. The remainder of a slice goes along with it."""
        return self.complete and len(self.frames) - self.given <= self.wanted

    def take(self) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """The next slice: its metadata and its arrays."""
        last = self.ends_with_slice
        end = len(self.frames) if last else self.given + self.wanted
        arrays = {
            "frames": self.frames[self.given : end].contiguous().numpy(),
            "pitch": self.pitch[self.given : end].contiguous().numpy(),
        }
        meta = {"total": self.total, "first": self.given == 0, "last": last}
        self.given, self.slices = end, self.slices + 1
        return meta, arrays


class TalkerState(State):
    """A request's text, and the sentence that is being spoken."""

    def __init__(self, request: StageRequest, sentences: Iterator[list[int]]) -> None:
        super().__init__(request, has_upstream=False)
        params = request.params
        self.voice = VOICES[params["voice"]]
        self.speed = float(params.get("speed", 1.0))
        self.temperature = float(params.get("temperature", 0.0))
        self.generator = torch.Generator().manual_seed(request.seed)
        self.sentences = sentences
        self.upcoming: deque[list[int]] = deque()
        self.sentence: Sentence | None = None
        self.spoken: SpokenSentence | None = None
        self.content = torch.zeros(0)
        self.step_at = 0

    @property
    def native_speed(self) -> float:
        """What the durations are scaled by."""
        return min(max(self.speed, NATIVE_SPEED[0]), NATIVE_SPEED[1]) if self.temperature == 0 else 1.0

    def look_ahead(self) -> bool:
        """Whether another sentence follows; its phonemes are then at hand."""
        if not self.upcoming and (ids := next(self.sentences, None)) is not None:
            self.upcoming.append(ids)
        return bool(self.upcoming)


class TalkerExecutor:
    """Both talkers over one pair of text encoders."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def load(self) -> None:
        """Load both networks and speak a sentence with each. Raises `ConfigError`."""
        self.prosody: Prosody = load_prosody().to(self.device)
        self.sampler = Autoregressive().eval()
        self.sampler.load_state_dict(load_file(AR_WEIGHTS))
        self.phonemizer = Phonemizer()
        for temperature in (0.0, 1.0):
            params = {"text": "Warm up.", "voice": "heart", "temperature": temperature}
            state = self.admit(StageRequest(request=0, params=params, seed=0))
            while not any(output.final for output in self.step([state])[0]):
                pass

    def admit(self, request: StageRequest) -> TalkerState:
        """Raises `InvalidRequest` for an unknown voice; the text is looked at when it is spoken."""
        if request.params["voice"] not in VOICES:
            raise InvalidRequest(f"This model has no voice {request.params['voice']!r}.", param="voice")
        return TalkerState(request, self.phonemizer.sentences(request.params["text"]))

    @torch.inference_mode()
    def step(self, states: Sequence[TalkerState]) -> list[list[StepOutput]]:
        """Begin a sentence where one is wanted, advance the sampled ones, give a slice of each at hand."""
        beginning = [state for state in states if state.sentence is None and self._has_text(state)]
        if beginning:
            self._begin(beginning)
        sampling = [state for state in states if state.spoken is not None and not _sentence(state).has_slice]
        if sampling:
            self._sample(sampling)
        return [self._give(state) for state in states]

    def _has_text(self, state: TalkerState) -> bool:
        if not state.look_ahead():
            raise InvalidRequest("input has nothing to speak in it.", param="input")
        return True

    def _begin(self, states: Sequence[TalkerState]) -> None:
        """Encode the next sentence of each state, all in one ragged batch."""
        batch = [state.upcoming[0] for state in states]
        lengths = [len(ids) for ids in batch]
        flat = torch.tensor([i for ids in batch for i in ids], device=self.device)
        texts = self.prosody.text(flat, lengths).split(lengths)
        contents = self.prosody.ctext(flat, lengths).split(lengths)
        units = [self.prosody.durations(text, s.native_speed) for text, s in zip(texts, states, strict=True)]
        encoded = list(zip(texts, contents, units, strict=True))
        plain = [(s, e) for s, e in zip(states, encoded, strict=True) if s.temperature == 0]
        if plain:
            self._speak(plain)
        for state, one in zip(states, encoded, strict=True):
            if state.temperature > 0:
                self._begin_sampling(state, one)
            state.upcoming.popleft()

    def _speak(self, rows: Sequence[tuple[TalkerState, Encoded]]) -> None:
        """The package's own prosody, a whole sentence for each row."""
        index = [torch.repeat_interleave(torch.arange(len(u), device=u.device), u) for _, (_, _, u) in rows]
        spread = torch.cat([text[i] for (_, (text, _, _)), i in zip(rows, index, strict=True)])
        contours = self.prosody.contours(spread, [len(i) for i in index])
        for (state, (_, content, _)), i, (pitch, energy) in zip(rows, index, contours, strict=True):
            pitch = pitch * state.voice.pitch
            frames = make_frames(content, i.repeat_interleave(2), pitch, energy)
            frames, pitch = _retime(frames.cpu(), pitch.cpu(), state.speed / state.native_speed)
            sentence = state.sentence = Sentence(total=len(frames))
            sentence.add(frames, pitch)
            sentence.complete = True

    def _begin_sampling(self, state: TalkerState, encoded: Encoded) -> None:
        text, content, units = encoded
        state.content = content.cpu()
        state.sentence = Sentence(total=None)
        state.step_at = 0
        state.spoken = SpokenSentence(
            text.cpu(),
            generator=state.generator,
            temperature=state.temperature,
            longest=int(LONGEST_FACTOR * int(units.sum())) + 40,
        )

    def _sample(self, states: Sequence[TalkerState]) -> None:
        """One step of 25 ms for each; codes become frames when a slice can be made of them."""
        self.sampler.step([spoken for state in states if (spoken := state.spoken) is not None])
        for state in states:
            spoken, sentence = state.spoken, _sentence(state)
            assert spoken is not None
            known = int(2 * len(spoken.index) / state.speed)
            if spoken.done or known - sentence.given >= sentence.wanted:
                sentence.add(*_decode(state, spoken))
            sentence.complete = spoken.done

    def _give(self, state: TalkerState) -> list[StepOutput]:
        sentence = _sentence(state)
        if not sentence.has_slice:
            return []
        ends = sentence.ends_with_slice
        final = ends and not state.look_ahead()
        meta, arrays = sentence.take()
        if ends:
            state.sentence = state.spoken = None
        return [StepOutput(tensors=arrays, meta=meta, final=final)]

    def abort(self, state: TalkerState) -> None:
        """Nothing is held outside the state."""

    def close(self) -> None:
        """Let the networks go."""
        del self.prosody, self.sampler


def _sentence(state: TalkerState) -> Sentence:
    assert state.sentence is not None
    return state.sentence


def _decode(state: TalkerState, spoken: SpokenSentence) -> tuple[Tensor, Tensor]:
    """The frames and pitch that the steps since the last time make."""
    first = state.step_at
    state.step_at = len(spoken.index)
    codes = torch.stack(spoken.codes[first:])
    pitch = decode_pitch(codes[:, :2]).flatten() * state.voice.pitch
    energy = decode_energy(codes[:, 2:]).flatten()
    index = torch.tensor(spoken.index[first:]).repeat_interleave(2)
    frames = make_frames(state.content, index, pitch, energy)
    return _retime(frames, pitch, state.speed, start=2 * first)


def _retime(frames: Tensor, pitch: Tensor, factor: float, start: int = 0) -> tuple[Tensor, Tensor]:
    """Frames played `factor` times as fast, by leaving out or repeating; pitch is kept.

    `start` is the position of the first frame, so that pieces give what the whole would.
    """
    if factor == 1.0:
        return frames, pitch
    first, end = _out_frames(start, factor), _out_frames(start + len(frames), factor)
    source = (torch.arange(first, end, dtype=torch.float64) * factor).floor().long() - start
    source = source.clamp(0, len(frames) - 1)
    return frames[source], pitch[source]


def _out_frames(frames: int, factor: float) -> int:
    return -int(-frames // factor)


def create(config: StageConfig) -> Executor:
    """The executor of a `talker` stage. Raises `ConfigError` for settings without effect."""
    if config.engine_extras:
        raise ConfigError(f"hibari's talker takes no engine_extras: {', '.join(config.engine_extras)}.")
    return TalkerExecutor(config.devices[0])
