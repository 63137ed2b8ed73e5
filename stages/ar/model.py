"""What the `ar` executor asks of a model, and what it keeps of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from omni_async.stages.ar.cache import RaggedCache, View
from omni_async.stages.ar.sampling import Sampler, Sampling
from omni_async.stages.executor import StageRequest, State, StepOutput


class Prompt(NamedTuple):
    """`embeds` `[positions, width]`; `rotary` int64 `[axes, positions]`, or None where they are 0, 1, …;
    `offset` is how far the rotary positions of what follows lie beyond those of the cache."""

    embeds: Tensor
    rotary: Tensor | None = None
    offset: int = 0


class ArState(State):
    """A request in an `ar` stage. `length` positions of it are in the cache."""

    def __init__(
        self, request: StageRequest, sampling: Sampling, *, has_upstream: bool, before: Sequence[int] = ()
    ) -> None:
        super().__init__(request, has_upstream=has_upstream)
        self.sampling = sampling
        self.sampler = Sampler(sampling, request.seed, before)
        self.slot = -1
        self.length = 0
        self.offset = 0
        self.tokens: list[int] = []
        self.done = False


class ArModel(Protocol):
    """A model that makes one token a step, and whatever it makes of that token.

    The executor calls for each step: `read` of every row; `prompt` or `next_embed` of those that can go on;
    `forward`; `logits`; `complete` with the chosen tokens; `take` of every row.
    """

    def load(self, slots: int) -> RaggedCache:
        """Load the weights; the cache for `slots` requests. Raises `ConfigError`."""
        ...

    def admit(self, request: StageRequest, sampling: Sampling) -> Any:
        """The `ArState` of a new request. Raises `InvalidRequest`."""
        ...

    def read(self, state: Any) -> None:
        """Take in what upstream sent. Raises what fails this request."""
        ...

    def prompt(self, state: Any) -> Prompt | None:
        """What the request begins with; None as long as something of it is missing."""
        ...

    def next_embed(self, state: Any) -> Tensor | None:
        """The next input `[width]`; None as long as something of it is missing. Asking changes nothing."""
        ...

    def forward(self, embeds: Tensor, rotary: Tensor, view: View) -> Tensor:
        """`[rows, positions, width]` and rotary positions int64 `[axes, rows, positions]` to the last
        layer's output."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, width]` → `[rows, vocabulary]`, tokens that never come at -inf."""
        ...

    def complete(self, states: Sequence[Any], hidden: Tensor, tokens: Sequence[int]) -> None:
        """The rows have made these tokens out of `hidden` `[rows, width]`. Sets `done` where a request ends.
        Whatever may raise comes before the first state changes."""
        ...

    def take(self, state: Any) -> list[StepOutput]:
        """What is ready to be sent; the last output of a `done` state is final."""
        ...

    def warm(self) -> list[Any]:
        """Admitted states, complete with their inputs, that run once before the first request."""
        ...
