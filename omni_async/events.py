"""What happens to the scheduler (events) and what it wants done (actions).

`key` is the engine's number of a caller's request; `wire` the number of one attempt at it, which
is what workers know. Frames are opaque here: they travel through untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from omni_async.errors import OmniError
from omni_async.messages import EngineMessage, Output, Tensors, WorkerMessage
from omni_async.status import RequestRecord

Frames = Sequence[Any]


class Submit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A caller wants `params` run through `pipeline`; `deadline` is on the scheduler's clock.

    `tensors` lie in `frames`, so that a retry can send them again. `outputs` are the final stages that are
    wanted (none named: all); those that only the others need never run.
    """

    key: int
    request_id: str
    pipeline: str
    params: dict[str, Any]
    seed: int
    gapless: bool
    deadline: float
    tensors: Tensors = {}
    frames: Frames = ()
    outputs: tuple[str, ...] = ()


class FromWorker(msgspec.Struct, frozen=True):
    """`replica` said `message`."""

    replica: str
    message: WorkerMessage
    frames: Frames = ()


class Taken(msgspec.Struct, frozen=True, gc=False):
    """The caller has taken `upto` chunks of `stage` from its stream."""

    key: int
    stage: str
    upto: int


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """The caller is gone, or cannot be given what was made for it (`error`)."""

    key: int
    error: OmniError | None = None


class WorkerUp(msgspec.Struct, frozen=True, gc=False):
    """`replica` takes work."""

    replica: str


class WorkerDown(msgspec.Struct, frozen=True, gc=False):
    """`replica` is gone. `permanent`: it will not come back."""

    replica: str
    reason: str
    permanent: bool = False


class Tick(msgspec.Struct, frozen=True, gc=False):
    """Time has passed."""


Event = Submit | FromWorker | Taken | Cancel | WorkerUp | WorkerDown | Tick


class Send(msgspec.Struct, frozen=True):
    """Send `message` to `replica`."""

    replica: str
    message: EngineMessage
    frames: Frames = ()


class Deliver(msgspec.Struct, frozen=True):
    """Put a chunk of stage `stage` into the caller's stream."""

    key: int
    stage: str
    output: Output
    frames: Frames


class End(msgspec.Struct, frozen=True):
    """The request is over: whole (`error` None), or with an error for the caller to see."""

    key: int
    error: OmniError | None
    record: RequestRecord


Action = Send | Deliver | End
