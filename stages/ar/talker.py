"""What talkers share: the state of an answer that is spoken while it is still being written.

A thinker's chunks bring the prompt's tokens (the first), the answer's tokens, and hidden states. Each step of
a talker is one codec frame; text goes into it token by token, and the frames leave in slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_async.errors import InvalidRequest
from omni_async.stages.ar.model import ArState
from omni_async.stages.ar.sampling import Sampling
from omni_async.stages.executor import StageRequest, StepOutput


class Thought:
    """What has come from the thinker. Its last token ends the text and is not spoken, as in the reference
    implementations."""

    def __init__(self) -> None:
        self.prompt_ids: list[int] = []
        self.media: dict[str, Any] = {}
        self.answer_ids: list[int] = []
        self.seen = 0
        self.ended = False
        self._hidden: list[NDArray[np.float32]] = []

    def read(self, state: ArState) -> None:
        """Take all chunks that have come. Raises `InvalidRequest` where there is nothing to answer to."""
        while state.inputs:
            chunk = state.inputs.popleft()
            meta = chunk.meta
            if "prompt_token_ids" in meta:
                self.prompt_ids, self.media = list(meta["prompt_token_ids"]), dict(meta["media"])
            self.answer_ids.extend(meta["token_ids"])
            if "hidden" in chunk.tensors:
                self._hidden.append(np.array(chunk.tensors["hidden"]))
                self.seen += len(self._hidden[-1])
            if chunk.final:
                self.ended = True
                del self.answer_ids[-1:]

    def rows(self, begin: int, end: int) -> Tensor:
        """Hidden states float32 `[end - begin, width]` of those positions, of the `seen` that have come.

        They are looked for from the end, where those of the next token are: a long prompt costs nothing.
        """
        found: list[NDArray[np.float32]] = []
        start = self.seen
        for part in reversed(self._hidden):
            start -= len(part)
            found.append(part[max(0, begin - start) : max(0, end - start)])
            if start <= begin:
                break
        return torch.from_numpy(np.concatenate(found[::-1]))


class TalkerState(ArState):
    """`text` are the rows `[width]` that wait to be spoken, one a step; `codec` is what the last frame adds
    to the next input."""

    def __init__(
        self,
        request: StageRequest,
        sampling: Sampling,
        slices: Sequence[int],
        *,
        before: Sequence[int] = (),
    ) -> None:
        super().__init__(request, sampling, has_upstream=True, before=before)
        self.voice: str = request.params["voice"]
        self.thought = Thought()
        self.begun = False
        self.spoken = 0
        self.text: deque[Tensor] = deque()
        self.text_ended = False
        self.codec: Tensor | None = None
        self.frames: list[list[int]] = []
        self._slices = deque(slices)
        self._wanted = self._slices.popleft()

    @property
    def ready(self) -> bool:
        """Something has come, or the next frame has what it needs."""
        return bool(self.inputs) or self.done or (self.codec is not None and self.has_text)

    @property
    def has_text(self) -> bool:
        """There is a token to go on with, or none will come."""
        return bool(self.text) or self.text_ended

    def next_row(self, pad: Tensor) -> Tensor | None:
        """The last frame's codes and the next text, or padding once the text has ended; None if something of
        it is missing."""
        if self.codec is None or not self.has_text:
            return None
        return self.codec + (self.text[0] if self.text else pad)

    def take_frames(self, rate: float) -> list[StepOutput]:
        """The frames as codes int32 `[groups, frames]`, if there are enough or no more will come; `rate` is
        frames a second."""
        if len(self.frames) < self._wanted and not self.done:
            return []
        made, self.frames = self.frames, []
        if self._slices:
            self._wanted = self._slices.popleft()
        tensors = {"codes": np.array(made, np.int32).T} if made else {}
        return [StepOutput(tensors=tensors, duration=len(made) / rate, final=self.done)]


def check_voice(voices: Collection[str], name: str) -> None:
    """Raises `InvalidRequest` unless the checkpoint has the voice; its names are in lower case."""
    if name.lower() not in voices:
        message = f"This model has no voice {name!r}; it has {', '.join(voices)}."
        raise InvalidRequest(message, param="audio.voice", code="unknown_voice")


def last_index(ids: Sequence[int], pattern: Sequence[int]) -> int:
    """Where `pattern` begins for the last time. Raises `InvalidRequest`."""
    size = len(pattern)
    for index in range(len(ids) - size, -1, -1):
        if list(ids[index : index + size]) == list(pattern):
            return index
    raise InvalidRequest(
        "Audio is an answer to messages; this prompt has no assistant's turn.", param="modalities"
    )


def media_places(talker: Any, ids: Tensor, media: Mapping[str, Any]) -> tuple[Tensor | None, int]:
    """Rotary positions int64 `[3, positions]` of a prompt with such media, by transformers' own rule, and how
    far those of what follows are beyond the places in the cache; None and 0 where they are 0, 1, …."""
    if not media:
        return None, 0
    tensors = {name: _stacked(values, ids.device) for name, values in media.items()}
    rotary, delta = talker.get_rope_index(
        ids[None],
        tensors.get("image_grid_thw"),
        tensors.get("video_grid_thw"),
        torch.ones_like(ids)[None],
        use_audio_in_video=False,
        audio_seqlens=tensors.get("audio_feature_lengths"),
        second_per_grids=tensors.get("second_per_grid_ts"),
    )
    return rotary[:, 0].long(), int(delta)


def _stacked(values: Sequence[Any], device: torch.device) -> Tensor:
    tensor = torch.tensor(values, device=device)
    return tensor if tensor.ndim > 1 and tensor.shape[-1] == 3 else tensor.reshape(-1)
