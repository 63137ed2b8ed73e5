"""The code2wav stage: frames → PCM at 24 kHz, a chunk of sound for each chunk of frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from omni_async.config import StageConfig
from omni_async.errors import ConfigError
from omni_async.stages.executor import Chunk, Executor, StageRequest, State, StepOutput
from omni_async.stages.models.hibari.decoder import Decoder, DecoderState
from omni_async.stages.models.hibari.frames import FRAME_CHANNELS
from omni_async.stages.models.hibari.noise import FrameNoise
from omni_async.stages.models.hibari.package_model import load_graph, model_path
from omni_async.stages.models.hibari.pulses import SAMPLE_RATE
from omni_async.stages.models.hibari.slices import FIRST_SLICES, SLICE
from omni_async.stages.models.hibari.spectra import Spectra
from omni_async.stages.models.hibari.vocoder import Vocoder
from omni_async.stages.models.hibari.voices import VOICES

WARM_HZ = 200.0


class SentenceSound:
    """One sentence on its way through decoder and vocoder."""

    def __init__(self) -> None:
        self.decoder = DecoderState()
        self.vocoder = Vocoder()


class Code2WavState(State):
    """A request's voice and noise, and the sentence that is being made."""

    def __init__(self, request: StageRequest) -> None:
        super().__init__(request, has_upstream=True)
        self.voice = VOICES[request.params["voice"]]
        self.noise = FrameNoise(request.seed)
        self.sentence = SentenceSound()

    @property
    def ready(self) -> bool:
        """A chunk of frames has come."""
        return bool(self.inputs)

    @property
    def cost(self) -> int:
        """Frames of the next chunk."""
        return len(self.inputs[0].tensors["pitch"]) if self.inputs else 0


class Code2WavExecutor:
    """hibari's decoder and vocoder. Rows run one after the other: on a CPU a batch would save nothing, and
    so no row's bits can depend on another."""

    def __init__(self, device: str) -> None:
        self._device = device

    def load(self) -> None:
        """Load the network and make a sentence in chunks of every size. Raises `ConfigError`."""
        torch.set_num_threads(1)
        self._decoder = Decoder(load_graph(model_path()), self._device)
        for voice in VOICES:
            state = self.admit(StageRequest(request=0, params={"voice": voice}, seed=0))
            sizes = (*FIRST_SLICES, SLICE)
            for number, frames in enumerate(sizes):
                state.inputs.append(_warm_chunk(frames, first=number == 0, last=number == len(sizes) - 1))
                self.step([state])

    def admit(self, request: StageRequest) -> Code2WavState:
        """The state of a new request."""
        return Code2WavState(request)

    def step(self, states: Sequence[Code2WavState]) -> list[list[StepOutput]]:
        """Make a chunk of sound of each state's next chunk of frames."""
        # All that may raise comes before the first state changes: a failed step is tried again row by row.
        decoded = [self._decode(state) for state in states]
        return [[self._sound(state, *each)] for state, each in zip(states, decoded, strict=True)]

    def _decode(self, state: Code2WavState) -> tuple[Spectra, DecoderState]:
        chunk = state.inputs[0]
        before = DecoderState() if chunk.meta["first"] else state.sentence.decoder
        spectra, after = self._decoder.advance(before, chunk.tensors["frames"], last=chunk.meta["last"])
        return state.voice.colour(spectra), after

    def _sound(self, state: Code2WavState, spectra: Spectra, after: DecoderState) -> StepOutput:
        chunk = state.inputs.popleft()
        if chunk.meta["first"]:
            state.sentence = SentenceSound()
        sentence = state.sentence
        sentence.decoder = after
        pitch, last = chunk.tensors["pitch"], chunk.meta["last"]
        pcm = sentence.vocoder.push(spectra, pitch, state.noise, last=last)
        return StepOutput(tensors={"pcm": pcm}, duration=len(pcm) / SAMPLE_RATE, final=chunk.final)

    def abort(self, state: Code2WavState) -> None:
        """Nothing is held outside the state."""

    def close(self) -> None:
        """Let the network go."""
        del self._decoder


def _warm_chunk(frames: int, *, first: bool, last: bool) -> Chunk:
    arrays = {
        "frames": np.zeros((frames, FRAME_CHANNELS), np.float32),
        "pitch": np.full(frames, WARM_HZ, np.float32),
    }
    return Chunk("talker", {"first": first, "last": last}, arrays, final=False)


def create(config: StageConfig) -> Executor:
    """The executor of a `code2wav` stage. Raises `ConfigError` for settings without effect."""
    if config.engine_extras:
        raise ConfigError(f"hibari's code2wav takes no engine_extras: {', '.join(config.engine_extras)}.")
    return Code2WavExecutor(config.devices[0])
