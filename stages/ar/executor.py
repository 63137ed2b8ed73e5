"""Continuous batching over a ragged cache: each step, new requests read their prompt and all others make a
token together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from omni_async.config import StageConfig
from omni_async.errors import OmniError
from omni_async.stages.ar.model import ArModel, ArState, Prompt
from omni_async.stages.ar.sampling import check_defaults, read_sampling
from omni_async.stages.executor import StageRequest, StepOutput, StepResult


class Moved(NamedTuple):
    """A row that went through the model: `hidden` `[1, width]` is the last layer's output at its end."""

    state: ArState
    hidden: Tensor
    length: int
    offset: int


class ArExecutor:
    """Runs an `ArModel`."""

    def __init__(self, config: StageConfig, model: ArModel) -> None:
        check_defaults(config)
        self.config = config
        self.model = model

    def load(self) -> None:
        """Load the model and run it once. Raises `ConfigError`."""
        self.cache = self.model.load(self.config.max_num_seqs)
        for state in self.model.warm():
            state.slot = self.cache.take()
            while state.slot >= 0:
                self.step([state])

    def admit(self, request: StageRequest) -> ArState:
        """Give the request a slot. Raises `InvalidRequest`."""
        state = self.model.admit(request, read_sampling(request))
        state.slot = self.cache.take()
        return state

    @torch.inference_mode()
    def step(self, states: Sequence[Any]) -> list[StepResult]:
        """A token for every state that has what it needs for one."""
        failed: dict[int, Exception] = {}
        for index, state in enumerate(states):
            try:
                self.model.read(state)
            except OmniError as error:
                failed[index] = error
        sound = [state for index, state in enumerate(states) if index not in failed and not state.done]
        self._advance(sound)
        return [failed[index] if index in failed else self._take(state) for index, state in enumerate(states)]

    def _advance(self, states: Sequence[Any]) -> None:
        moved = [
            self._prefill(state, prompt)
            for state in states
            if state.length == 0 and (prompt := self.model.prompt(state)) is not None
        ]
        going = [(state, self.model.next_embed(state)) for state in states if state.length]
        moved += self._decode([(state, embed) for state, embed in going if embed is not None])
        if not moved:
            return
        hidden = torch.cat([each.hidden for each in moved])
        logits = self.model.logits(hidden)
        tokens = [
            each.state.sampler.choose(row, each.state.tokens) for each, row in zip(moved, logits, strict=True)
        ]
        # The last that may raise; before it no state has changed.
        self.model.complete([each.state for each in moved], hidden, tokens)
        for each in moved:
            each.state.length, each.state.offset = each.length, each.offset

    def _prefill(self, state: ArState, prompt: Prompt) -> Moved:
        count = len(prompt.embeds)
        rotary = prompt.rotary
        if rotary is None:
            rotary = torch.arange(count, device=prompt.embeds.device)[None]
        view = self.cache.view([state.slot], [0], count)
        hidden = self.model.forward(prompt.embeds[None], rotary[:, None], view)
        return Moved(state, hidden[:, -1], count, prompt.offset)

    def _decode(self, rows: Sequence[tuple[Any, Tensor]]) -> list[Moved]:
        if not rows:
            return []
        # In the order of their slots: neighbours are read without being gathered.
        rows = sorted(rows, key=lambda row: row[0].slot)
        states = [state for state, _ in rows]
        embeds = torch.stack([embed for _, embed in rows])[:, None]
        places = [state.length + state.offset for state in states]
        rotary = torch.tensor(places, device=embeds.device)[None, :, None]
        view = self.cache.view([state.slot for state in states], [state.length for state in states])
        hidden = self.model.forward(embeds, rotary, view)
        return [
            Moved(state, row, state.length + 1, state.offset)
            for state, row in zip(states, hidden, strict=True)
        ]

    def _take(self, state: Any) -> list[StepOutput]:
        outputs = self.model.take(state)
        if outputs and outputs[-1].final:
            self._free(state)
        return outputs

    def _free(self, state: ArState) -> None:
        if state.slot >= 0:
            self.cache.give(state.slot)
            state.slot = -1

    def abort(self, state: ArState) -> None:
        """Give the slot back."""
        self._free(state)

    def close(self) -> None:
        """Let the model go."""
        del self.model, self.cache
