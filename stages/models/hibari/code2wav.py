"""The code2wav stage: frames → PCM at 24 kHz, a chunk of sound for each chunk of frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from omni_async.config import StageConfig
from omni_async.errors import ConfigError
from omni_async.stages.executor import Chunk, Executor, StageRequest, State, StepOutput
from omni_async.stages.models.hibari.decoder import LOOKAHEAD, Decoder, DecoderState
from omni_async.stages.models.hibari.noise import FrameNoise, SentenceNoise
from omni_async.stages.models.hibari.prosody import FRAME_CHANNELS
from omni_async.stages.models.hibari.vocoder import SAMPLE_RATE, Noise, Vocoder
from omni_async.stages.models.hibari.voices import VOICES
from omni_async.stages.models.hibari.weights import load_decoder

WARM_FRAMES = (20 + LOOKAHEAD, 80, 160)


class Code2WavState(State):
    """A request's random numbers, and the sentence that is being decoded."""

    def __init__(self, request: StageRequest, device: torch.device) -> None:
        super().__init__(request, has_upstream=True)
        self.device = device
        self.voice = VOICES[request.params["voice"]]
        self.rng = np.random.default_rng(request.seed)
        self.pitch = torch.zeros(0)
        self.decoder = DecoderState(device)
        self.vocoder = Vocoder()
        self.noise: Noise = FrameNoise(self.rng)

    @property
    def ready(self) -> bool:
        """A chunk of frames has come."""
        return bool(self.inputs)

    @property
    def cost(self) -> int:
        """Frames of the next chunk."""
        return len(self.inputs[0].tensors["pitch"]) if self.inputs else 0

    def begin(self, total: int | None) -> None:
        """A new sentence, of `total` frames where that is known already."""
        self.decoder = DecoderState(self.device)
        self.vocoder = Vocoder()
        self.pitch = torch.zeros(0)
        self.noise = FrameNoise(self.rng) if total is None else SentenceNoise(self.rng, total)


class Code2WavExecutor:
    """hibari's decoder and vocoder."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def load(self) -> None:
        """Load the network and decode a sentence in chunks of every size. Raises `ConfigError`."""
        self.net: Decoder = load_decoder().to(self.device)
        state = self.admit(StageRequest(request=0, params={"voice": "heart"}, seed=0))
        for number, frames in enumerate(WARM_FRAMES):
            meta = {"total": None, "first": number == 0, "last": False}
            arrays = {
                "frames": np.zeros((frames, FRAME_CHANNELS), np.float32),
                "pitch": np.full(frames, 200.0, np.float32),
            }
            state.inputs.append(Chunk("talker", meta, arrays, final=False))
            self.step([state])

    def admit(self, request: StageRequest) -> Code2WavState:
        """The state of a new request."""
        return Code2WavState(request, self.device)

    @torch.inference_mode()
    def step(self, states: Sequence[Code2WavState]) -> list[list[StepOutput]]:
        """Decode one chunk of each state, all in one ragged batch."""
        chunks = [state.inputs[0] for state in states]
        for state, chunk in zip(states, chunks, strict=True):
            if chunk.meta["first"]:
                state.begin(chunk.meta["total"])
        maps = self.net(
            [self._frames(chunk) for chunk in chunks],
            [state.decoder for state in states],
            [chunk.meta["last"] for chunk in chunks],
        )
        return [[self._sound(*each)] for each in zip(states, chunks, maps, strict=True)]

    def _frames(self, chunk: Chunk) -> Tensor:
        return torch.from_numpy(np.array(chunk.tensors["frames"])).to(self.device)

    def _sound(self, state: Code2WavState, chunk: Chunk, maps: Tensor) -> StepOutput:
        """The maps as PCM. The maps lag behind the frames, and so does the pitch that goes with them."""
        state.pitch = torch.cat([state.pitch, torch.from_numpy(np.array(chunk.tensors["pitch"]))])
        pitch, state.pitch = state.pitch.split([len(maps), len(state.pitch) - len(maps)])
        coloured = state.voice.colour(maps.cpu())
        pcm = state.vocoder.push(coloured, pitch, state.noise, last=chunk.meta["last"])
        state.inputs.popleft()
        return StepOutput(
            tensors={"pcm": pcm.numpy()}, duration=len(pcm) / SAMPLE_RATE, final=chunk.final
        )

    def abort(self, state: Code2WavState) -> None:
        """Nothing is held outside the state."""

    def close(self) -> None:
        """Let the network go."""
        del self.net


def create(config: StageConfig) -> Executor:
    """The executor of a `code2wav` stage. Raises `ConfigError` for settings without effect."""
    if config.engine_extras:
        raise ConfigError(f"hibari's code2wav takes no engine_extras: {', '.join(config.engine_extras)}.")
    return Code2WavExecutor(config.devices[0])
