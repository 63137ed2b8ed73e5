"""Qwen3-Omni's code2wav: frames of codes → PCM at 24 kHz, a chunk of sound for each chunk of frames.

The decoder looks back only, so a chunk is decoded with the frames before it, and what has left already is
cut off by its absolute position: the seams are where the samples are, none is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import Tensor

from omni_async.config import StageConfig
from omni_async.stages.ar.loading import Dtype, load_model, read_settings, torch_dtype
from omni_async.stages.executor import Executor, StageRequest, State, StepOutput
from omni_async.stages.models.qwen3_omni.parts import Code2WavPart
from omni_async.stages.models.qwen3_omni.rates import SAMPLE_RATE, samples_per_frame

KERNEL = 7
DILATIONS = (1, 3, 9)
"""Of the decoder's convolutions, as in transformers' modules."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`left_context` are the frames that the transformer reads again before each chunk: 72 is its window.
    `most_frames` is what one decoding takes at most."""

    dtype: Dtype = "auto"
    left_context: Annotated[int, Meta(ge=1)] = 72
    most_frames: Annotated[int, Meta(ge=1)] = 256


class Code2WavState(State):
    """`codes` int64 `[groups, frames]` begin at frame `first`; the frames before `decoded` have been through
    the decoder, the samples before `emitted` have left."""

    def __init__(self, request: StageRequest) -> None:
        super().__init__(request, has_upstream=True)
        self.codes: NDArray[np.int64] | None = None
        self.first = 0
        self.decoded = 0
        self.emitted = 0
        self.ended = False

    @property
    def have(self) -> int:
        """Frames that have come."""
        return 0 if self.codes is None else self.first + self.codes.shape[1]

    @property
    def ready(self) -> bool:
        """Frames have come, or wait to be decoded."""
        return bool(self.inputs) or self.decoded < self.have or self.ended

    def read(self) -> None:
        """Take in all chunks that have come."""
        while self.inputs:
            chunk = self.inputs.popleft()
            if "codes" in chunk.tensors:
                new = np.array(chunk.tensors["codes"], np.int64)
                self.codes = new if self.codes is None else np.concatenate([self.codes, new], axis=1)
            self.ended |= chunk.final


class Piece(msgspec.Struct):
    """Frames `begin` … `end` of a state, which the decoder is to take; the convolutions take the last
    `convolved` of them."""

    state: Code2WavState
    begin: int
    end: int
    convolved: int

    @property
    def codes(self) -> Tensor:
        """int64 `[groups, frames]`."""
        codes, first = self.state.codes, self.state.first
        assert codes is not None
        return torch.from_numpy(codes[:, self.begin - first : self.end - first])


class Code2WavExecutor:
    """All rows of a step go through the decoder together, padded on the right, where it does not look."""

    def __init__(self, config: StageConfig) -> None:
        self.config = config
        self.settings = read_settings(config, Settings)

    def load(self) -> None:
        """Load the decoder and run it once. Raises `ConfigError`."""
        self._device = self.config.devices[0]
        part: Any = load_model(Code2WavPart, self.config, torch_dtype(self.settings.dtype, self._device))
        self.model = part.code2wav
        self.rate = samples_per_frame(part.config)
        self.context = left_frames(part.config.code2wav_config)
        state = Code2WavState(StageRequest(request=-1, params={}, seed=0))
        state.codes = np.zeros((part.config.code2wav_config.num_quantizers, 2), np.int64)
        self.step([state])

    def admit(self, request: StageRequest) -> Code2WavState:
        """The state of a new request."""
        return Code2WavState(request)

    def step(self, states: Sequence[Code2WavState]) -> list[list[StepOutput]]:
        """Decode the frames that have come, `most_frames` of each row at most."""
        for state in states:
            state.read()
        pieces = [self._piece(state) for state in states if state.decoded < state.have]
        # All that may raise comes before the first state changes: a failed step is tried again row by row.
        sounds = {id(piece.state): sound for piece, sound in zip(pieces, self._decode(pieces), strict=True)}
        ends = {id(piece.state): piece.end for piece in pieces}
        return [
            self._emit(state, sounds.get(id(state)), ends.get(id(state), state.decoded)) for state in states
        ]

    def _piece(self, state: Code2WavState) -> Piece:
        end = min(state.have, state.decoded + self.settings.most_frames)
        begin = max(0, state.decoded - self.context - self.settings.left_context)
        return Piece(state, begin, end, end - max(0, state.decoded - self.context))

    @torch.inference_mode()
    def _decode(self, pieces: Sequence[Piece]) -> list[NDArray[np.float32]]:
        """The samples float32 `[samples]` of each piece that have not left yet."""
        if not pieces:
            return []
        hidden = self._transform([piece.codes for piece in pieces])
        rows = [each[len(each) - piece.convolved :] for piece, each in zip(pieces, hidden, strict=True)]
        sounds = self._convolve(rows).float().cpu().numpy()
        cut: list[NDArray[np.float32]] = []
        for piece, sound in zip(pieces, sounds, strict=True):
            base = (piece.end - piece.convolved) * self.rate
            # Right of what all of its frames make up, the padding is heard.
            made = self._samples(piece.convolved)
            cut.append(sound[piece.state.emitted - base : made].copy())
        return cut

    def _transform(self, codes: Sequence[Tensor]) -> list[Tensor]:
        """The transformer's output for each row, `[frames, width]`."""
        padded = torch.nn.utils.rnn.pad_sequence([each.T for each in codes], batch_first=True)
        ids = padded.transpose(1, 2).to(self._device) + self.model.code_offset
        embeds = self.model.code_embedding(ids).mean(1)
        hidden = self.model.pre_transformer(inputs_embeds=embeds, use_cache=False).last_hidden_state
        return [row[: each.shape[1]] for row, each in zip(hidden, codes, strict=True)]

    def _convolve(self, rows: Sequence[Tensor]) -> Tensor:
        """`[rows, samples]` of rows `[frames, width]`."""
        wave = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).transpose(1, 2)
        for blocks in self.model.upsample:
            for block in blocks:
                wave = block(wave)
        for block in self.model.decoder:
            wave = block(wave)
        return wave[:, 0].clamp(-1, 1)

    def _samples(self, frames: int) -> int:
        """How many samples the decoder makes of so many frames: each transposed convolution needs the step
        that follows, and so the last steps wait."""
        decoder = self.model.config
        length = frames
        for ratio in decoder.upsampling_ratios:
            length *= ratio
        for rate in decoder.upsample_rates:
            length = max(0, length - 1) * rate
        return length

    def _emit(self, state: Code2WavState, sound: NDArray[np.float32] | None, end: int) -> list[StepOutput]:
        state.decoded = end
        final = state.ended and state.decoded == state.have
        keep = max(0, state.decoded - self.context - self.settings.left_context)
        if state.codes is not None and keep > state.first:
            state.codes, state.first = state.codes[:, keep - state.first :], keep
        if sound is None:
            sound = np.zeros(0, np.float32)
        if not len(sound) and not final:
            return []
        state.emitted += len(sound)
        return [StepOutput(tensors={"pcm": sound}, duration=len(sound) / SAMPLE_RATE, final=final)]

    def abort(self, state: Code2WavState) -> None:
        """Nothing is held outside the state."""

    def close(self) -> None:
        """Let the decoder go."""
        del self.model


def left_frames(decoder: Any) -> int:
    """How many frames back a sample depends on through the convolutions."""
    rate, frames = 1.0, 0.0
    for ratio in decoder.upsampling_ratios:
        rate *= ratio
        frames += (KERNEL - 1) / rate
    frames += (KERNEL - 1) / rate
    for factor in decoder.upsample_rates:
        rate *= factor
        frames += sum((KERNEL - 1) * dilation for dilation in DILATIONS) / rate
    frames += (KERNEL - 1) / rate
    return ceil(frames)


def create(config: StageConfig) -> Executor:
    """The executor of Qwen3-Omni's `code2wav`. Raises `ConfigError`."""
    return Code2WavExecutor(config)
