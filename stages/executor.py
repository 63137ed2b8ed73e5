"""The contract between the worker loop and a model: five verbs of plain synchronous code.

`load` (and warm every shape that will run) · `admit` a request and return its state ·
`step` a batch of states · `abort` a state · `close`. All state of a request hangs on its
`State`; nothing is keyed by the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol

from numpy.typing import NDArray

from omni_async.errors import InvalidRequest

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A request as a stage sees it.

    `params` are the caller's resolved parameters laid over the stage's `default_sampling_params`; `own` names
    those that are meant for this stage alone.
    `seed` is always set: the caller's, or one drawn by the engine (a retry keeps it).
    """

    request: int
    params: Mapping[str, Any]
    seed: int
    tensors: Arrays = field(default_factory=dict[str, NDArray[Any]])
    public_id: str = ""
    own: frozenset[str] = frozenset()

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raises `InvalidRequest` for what is asked of this stage alone (`own`) and is not in `known`."""
        for name in sorted(self.own):
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f" Did you mean {near[0]}?" if near else f" It takes {', '.join(known)}."
                message = f"This stage takes no {name!r}.{hint}"
                raise InvalidRequest(message, param="sampling_params_list", code="unknown_field")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk that an upstream stage made. The arrays are read-only views that stay valid until
    the step that pops the chunk from `State.inputs` has returned: copy what is kept longer."""

    source: str
    meta: Mapping[str, Any]
    tensors: Arrays
    final: bool


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step made for one state. `duration` is seconds of media; `final` ends the request here."""

    tensors: Arrays = field(default_factory=dict[str, NDArray[Any]])
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    duration: float = 0.0
    final: bool = False


StepResult = list[StepOutput] | Exception
"""What became of one state in a step: what it made, or the error that fails it alone."""


def outputs_of(result: StepResult) -> list[StepOutput]:
    """What was made; raises the error if there is one."""
    if isinstance(result, Exception):
        raise result
    return result


class State:
    """Base of what an executor keeps per request. Subclass it and add fields.

    The worker appends to `inputs` and sets `input_done` once every upstream stage has sent its
    final chunk. The executor takes chunks with `inputs.popleft()` inside `step`.
    """

    def __init__(self, request: StageRequest, *, has_upstream: bool) -> None:
        self.request = request
        self.inputs: deque[Chunk] = deque()
        self.input_done = not has_upstream

    @property
    def ready(self) -> bool:
        """Whether a step would make progress now. The worker steps ready states only."""
        return bool(self.inputs) or self.input_done

    @property
    def cost(self) -> int:
        """Work of the next step in the executor's own unit (frames, tokens), for the batch budget
        `max_num_batched_tokens`."""
        return 1

    @property
    def batch_key(self) -> Hashable:
        """States of one step have equal keys. Groups of other keys take their turns."""
        return None


class Executor(Protocol):
    """A model in a stage process."""

    def load(self) -> None:
        """Load weights and run every shape that `step` will use once. Raises `ConfigError`."""
        ...

    def admit(self, request: StageRequest) -> State:
        """Make the state of a new request; cheap. Raising fails this request only."""
        ...

    def step(self, states: Sequence[Any]) -> Sequence[StepResult]:
        """Advance every state once and return, aligned with `states`, what became of each.

        Raising makes the worker retry row by row: so a step must not change a state before
        everything that may raise has run, or must be safe to run again.
        """
        ...

    def abort(self, state: Any) -> None:
        """Release what the state holds outside itself; called at most once, not after `final`."""
        ...

    def close(self) -> None:
        """Release the model."""
        ...
