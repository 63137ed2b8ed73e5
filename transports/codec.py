"""Messages ↔ frames: one msgpack header frame, then bulk data as frames of their own.

No IO. The payload frames pass through untouched in both directions, so that whoever owns the
socket decides where they are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast, get_args

import msgspec

from omni_async.messages import EngineMessage, Heartbeat, WorkerMessage
from omni_async.transports.channel import Buffer

In = TypeVar("In")
Out = TypeVar("Out")


class MalformedMessage(ValueError):
    """The frames are not a message of this channel."""


class Codec(Generic[Out, In]):
    """Encodes the union `out_type` and decodes the union `in_type`; either may be one Struct."""

    def __init__(self, out_type: Any, in_type: Any) -> None:
        self._out_types: tuple[type, ...] = get_args(out_type) or (out_type,)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(in_type).decode

    def encode(self, message: Out, frames: Sequence[Buffer] = ()) -> list[Buffer]:
        """The header followed by `frames`, which are neither copied nor changed.

        Raises `TypeError` when `message` does not belong on this channel or holds something that
        msgpack cannot carry, and `ValueError` or `OverflowError` when a number is out of its range.
        """
        if not isinstance(message, self._out_types):
            raise TypeError(f"{type(message).__name__} is not a message of this channel")
        return [self._encode(message), *frames]

    def decode(self, frames: Sequence[Buffer]) -> tuple[In, list[memoryview]]:
        """The message and read-only views of the frames after the header.

        Raises `MalformedMessage`.
        """
        if not frames:
            raise MalformedMessage("a message has a header frame")
        try:
            message = cast(In, self._decode(frames[0]))
        # Deep nesting and text that is not UTF-8 have their own exceptions in msgspec.
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MalformedMessage(f"the header does not decode: {error}") from error
        return message, [memoryview(frame).toreadonly() for frame in frames[1:]]


def engine_codec() -> Codec[EngineMessage, WorkerMessage]:
    """What the engine says and hears."""
    return Codec(EngineMessage, WorkerMessage)


def worker_codec() -> Codec[WorkerMessage, EngineMessage]:
    """What a worker says and hears."""
    return Codec(WorkerMessage, EngineMessage)


def heartbeat_codec() -> Codec[Heartbeat, Heartbeat]:
    """What the monitor socket carries."""
    return Codec(Heartbeat, Heartbeat)
