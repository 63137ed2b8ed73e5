"""Qwen2.5-Omni's token2wav: codes → PCM at 24 kHz, some blocks of 24 frames at a time.

The diffusion transformer looks one block ahead in each of its evaluations, so that strictly a block depends
on all that follow. Blocks are denoised in windows with context on either side, at places that depend on the
codes alone: company and timing change nothing. `chunk_blocks: []` denoises each answer whole, which is what
the reference implementation does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from omni_async.config import StageConfig
from omni_async.stages.ar.loading import load_model, read_settings
from omni_async.stages.ar.talker import check_voice
from omni_async.stages.executor import Executor, StageRequest, State, StepOutput
from omni_async.stages.models.qwen2_5_omni.decoder import Denoiser, vocode, vocoder_reach
from omni_async.stages.models.qwen2_5_omni.parts import Token2WavPart, load_voices
from omni_async.stages.models.qwen2_5_omni.rates import SAMPLE_RATE, samples_per_mel

Blocks = Annotated[int, Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`chunk_blocks` are the blocks that each window is denoised for, the last number standing for all that
    follow (none: the whole answer at once); `left_blocks` and `right_blocks` are denoised beside them."""

    chunk_blocks: tuple[Blocks, ...] = (4, 4, 8)
    left_blocks: Blocks = 4
    right_blocks: Blocks = 2


class Token2WavState(State):
    """`codes` have come. Of the mel, float32 `[frames, mels]` from frame `first` on, the frames before `end`
    are there; the samples of those before `heard` have left."""

    def __init__(
        self, request: StageRequest, settings: Settings, *, block: int, repeats: int, mels: int
    ) -> None:
        super().__init__(request, has_upstream=True)
        self.voice: str = request.params["voice"].lower()
        self._block, self._repeats = block, repeats
        self.codes: list[int] = []
        self.ended = False
        self.chunk = 0
        self.first = self.end = self.heard = 0
        self.mel = torch.zeros(0, mels)
        self._settings = settings
        self._noise = torch.zeros(0, mels)
        self._generator = torch.Generator().manual_seed(request.seed % 2**63)

    @property
    def ready(self) -> bool:
        """Codes have come, or wait to be denoised."""
        return bool(self.inputs) or self.ended or self.window() is not None

    @property
    def frames(self) -> int:
        """Of mel, that the codes will make up."""
        return len(self.codes) * self._repeats

    def read(self) -> None:
        """Take in all chunks that have come."""
        while self.inputs:
            chunk = self.inputs.popleft()
            if "codes" in chunk.tensors:
                self.codes.extend(chunk.tensors["codes"][0].tolist())
            self.ended |= chunk.final

    def noise(self, window: Window) -> Tensor:
        """That of the window's frames: at each place a request has one noise, whatever the window."""
        while len(self._noise) < window.end:
            drawn = torch.randn(self._block, self._noise.shape[1], generator=self._generator)
            self._noise = torch.cat([self._noise, drawn])
        return self._noise[window.begin : window.end]

    def said(self, window: Window) -> list[int]:
        """Its codes."""
        return self.codes[window.begin // self._repeats : window.end // self._repeats]

    def window(self) -> Window | None:
        """What is to be denoised next, if its codes are there."""
        sizes, block, frames = self._settings.chunk_blocks, self._block, self.frames
        if frames == self.end:
            return None
        if not sizes:
            return Window(0, frames, frames) if self.ended else None
        size = sizes[min(self.chunk, len(sizes) - 1)] * block
        begin = max(0, self.end - self._settings.left_blocks * block)
        upto = self.end + size + self._settings.right_blocks * block
        # Only when more has come is it known that this is not the last window.
        if frames > upto:
            return Window(begin, upto, self.end + size)
        return Window(begin, frames, frames) if self.ended else None


class Window(msgspec.Struct, frozen=True):
    """Frames `begin` … `end` are denoised; those before `keep` are the mel."""

    begin: int
    end: int
    keep: int


class Token2WavExecutor:
    """Windows of one length go through the transformer together, and those of the vocoder likewise."""

    def __init__(self, config: StageConfig) -> None:
        self.config = config
        self.settings = read_settings(config, Settings)

    def load(self) -> None:
        """Load the decoder and run it once. Raises `ConfigError`."""
        # In float32 as the reference implementation, whatever the other stages have.
        part: Any = load_model(Token2WavPart, self.config, torch.float32)
        model = part.token2wav
        self.voices = load_voices(self.config)
        self.denoiser = Denoiser(model.code2wav_dit_model, self.voices)
        self.vocoder = model.code2wav_bigvgan_model
        shape = part.config.token2wav_config
        dit = shape.dit_config
        self.shape = {"block": dit.block_size, "repeats": dit.repeats, "mels": dit.mel_dim}
        self.rate = samples_per_mel(part.config)
        self.reach = vocoder_reach(shape.bigvgan_config)
        state = self.admit(StageRequest(request=-1, params={"voice": next(iter(self.voices))}, seed=0))
        state.codes, state.ended = [0] * dit.block_size, True
        self.step([state])

    def admit(self, request: StageRequest) -> Token2WavState:
        """The state of a new request. Raises `InvalidRequest` for a voice that the checkpoint has not."""
        check_voice(self.voices, request.params["voice"])
        return Token2WavState(request, self.settings, **self.shape)

    @torch.inference_mode()
    def step(self, states: Sequence[Token2WavState]) -> list[list[StepOutput]]:
        """Denoise the next window of every row that has one, and let its sound leave."""
        for state in states:
            state.read()
        windows = {state: window for state in states if (window := state.window())}
        mels = self._denoise(windows)
        sounds = self._vocode({state: self._heard(state, windows[state], mel) for state, mel in mels.items()})
        # Nothing has changed before all that may raise: a failed step is tried again row by row.
        return [self._emit(state, windows.get(state), mels, sounds) for state in states]

    def _denoise(self, windows: dict[Token2WavState, Window]) -> dict[Token2WavState, Tensor]:
        """The new frames `[frames, mels]` of each row."""
        made: dict[Token2WavState, Tensor] = {}
        for rows in _of_one_length({state: each.end - each.begin for state, each in windows.items()}):
            noise = torch.stack([state.noise(windows[state]) for state in rows])
            codes = torch.tensor([state.said(windows[state]) for state in rows])
            mel = self.denoiser.mel(noise, codes, [state.voice for state in rows])
            for state, frames in zip(rows, mel.cpu(), strict=True):
                window = windows[state]
                made[state] = frames[state.end - window.begin : window.keep - window.begin]
        return made

    def _heard(self, state: Token2WavState, window: Window, mel: Tensor) -> tuple[Tensor, int, int]:
        """The mel that the vocoder reads, and the frames `begin` … `end` of it that will be heard."""
        known = torch.cat([state.mel, mel])
        begin = max(state.first, state.heard - self.reach)
        last = state.ended and window.end == window.keep
        upto = window.keep if last else max(state.heard, window.keep - self.reach)
        return known[begin - state.first :], state.heard - begin, upto - begin

    def _vocode(
        self, heard: dict[Token2WavState, tuple[Tensor, int, int]]
    ) -> dict[Token2WavState, NDArray[np.float32]]:
        """The new samples of each row."""
        made: dict[Token2WavState, NDArray[np.float32]] = {}
        for rows in _of_one_length({state: len(mel) for state, (mel, _, _) in heard.items()}):
            mel = torch.stack([heard[state][0] for state in rows]).to(self.config.devices[0])
            for state, sound in zip(rows, vocode(self.vocoder, mel).numpy(), strict=True):
                _, begin, end = heard[state]
                made[state] = sound[begin * self.rate : end * self.rate].copy()
        return made

    def _emit(
        self,
        state: Token2WavState,
        window: Window | None,
        mels: dict[Token2WavState, Tensor],
        sounds: dict[Token2WavState, NDArray[np.float32]],
    ) -> list[StepOutput]:
        sound = sounds.get(state, np.zeros(0, np.float32))
        if window is not None:
            state.mel = torch.cat([state.mel, mels[state]])
            state.end = window.keep
            state.chunk += 1
            state.heard += len(sound) // self.rate
            stale = max(state.first, state.heard - self.reach) - state.first
            state.mel, state.first = state.mel[stale:], state.first + stale
        final = state.ended and state.end == state.frames
        if not len(sound) and not final:
            return []
        return [StepOutput(tensors={"pcm": sound}, duration=len(sound) / SAMPLE_RATE, final=final)]

    def abort(self, state: Token2WavState) -> None:
        """Nothing is held outside the state."""

    def close(self) -> None:
        """Let the decoder go."""
        del self.denoiser, self.vocoder


def _of_one_length(lengths: dict[Token2WavState, int]) -> list[list[Token2WavState]]:
    groups: dict[int, list[Token2WavState]] = defaultdict(list)
    for state, length in lengths.items():
        groups[length].append(state)
    return list(groups.values())


def create(config: StageConfig) -> Executor:
    """The executor of Qwen2.5-Omni's token2wav. Raises `ConfigError`."""
    return Token2WavExecutor(config)
