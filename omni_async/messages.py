"""Every message that crosses a process boundary: one union per direction.

Bulk data is never inside a message. A `TensorRef` says where it lies: in a further
frame of the same multipart message, or in the sender's shared-memory arena.
`request` is the engine's own number of one attempt at one request; a retry gets a
new number, so that late messages of the old attempt can be told apart and dropped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from omni_async.errors import ErrorInfo


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of one C-contiguous tensor lie.

    `dtype` is a numpy name ("float32", "int16", "uint8"). With `segment` empty the bytes are
    frame number `frame` (0 = first after the header); otherwise they are `offset` bytes into the
    arena file `segment` of the server's run folder.
    """

    dtype: str
    shape: tuple[int, ...]
    frame: int = 0
    segment: str = ""
    offset: int = 0


Tensors = dict[str, TensorRef]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    pass


class Configure(_Message, frozen=True, kw_only=True):
    """The first message to a worker: its resolved stage config, as builtins."""

    stage: dict[str, Any]
    arena_bytes: int
    inline_limit: int


class Submit(_Message, frozen=True, kw_only=True):
    """Open a request at this stage. `due_in` is seconds from now until its next output is due."""

    request: int
    params: dict[str, Any]
    seed: int
    window: int
    due_in: float
    public_id: str = ""
    tensors: Tensors = {}


class Input(_Message, frozen=True, kw_only=True):
    """Chunk number `seq` of the output of stage `source`. `final` marks the last."""

    request: int
    source: str
    seq: int
    meta: dict[str, Any] = {}
    tensors: Tensors = {}
    final: bool = False
    due_in: float = 0.0


class Credit(_Message, frozen=True, kw_only=True):
    """All consumers are done with output chunks below `upto`; their memory may be reused."""

    request: int
    upto: int
    due_in: float


class Abort(_Message, frozen=True, kw_only=True):
    """Forget the request at once; nothing more is to be sent for it."""

    request: int


class Stop(_Message, frozen=True, kw_only=True):
    """Close the executor and leave."""


EngineMessage = Configure | Submit | Input | Credit | Abort | Stop


class Hello(_Message, frozen=True, kw_only=True):
    """The worker process runs and waits for `Configure`."""

    pid: int


class Ready(_Message, frozen=True, kw_only=True):
    """The model is loaded and warm."""

    load_seconds: float


class Output(_Message, frozen=True, kw_only=True):
    """Chunk number `seq` of this stage's output; `duration` is its length in seconds of media."""

    request: int
    seq: int
    meta: dict[str, Any] = {}
    tensors: Tensors = {}
    duration: float = 0.0
    final: bool = False


class Consumed(_Message, frozen=True, kw_only=True):
    """Input chunks of `source` below `upto` have been used; their memory may be reused."""

    request: int
    source: str
    upto: int


class Failed(_Message, frozen=True, kw_only=True):
    """This stage fails this request; the worker has forgotten it."""

    request: int
    error: ErrorInfo


class Fatal(_Message, frozen=True, kw_only=True):
    """The worker cannot go on (for example: its model does not load) and leaves."""

    error: ErrorInfo


class Heartbeat(_Message, frozen=True, kw_only=True):
    """Sent every second by a thread of its own, also while a step runs."""

    replica: str
    steps: int
    running: int
    last_step_age: float
    busy_seconds: float
    batch_size: float = 0.0


SCHEDULING = (Output, Consumed, Failed)
"""What a worker says about requests; the rest is about itself."""

WorkerMessage = Hello | Ready | Output | Consumed | Failed | Fatal | Heartbeat
