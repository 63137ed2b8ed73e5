"""Arrays ↔ what a message carries of them: small ones as frames, large ones in the arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_async.messages import TensorRef, Tensors
from omni_async.transports.arena import Arena, dtype_name
from omni_async.transports.arena_reader import ArenaReader, as_array, nbytes
from omni_async.transports.channel import Buffer

INLINE_LIMIT = 16 * 1024
"""Bytes up to which a frame is cheaper than a lease and its credit."""


def pack(
    arrays: Mapping[str, NDArray[Any]],
    *,
    arena: Arena | None,
    request: int,
    seq: int,
    inline_limit: int = INLINE_LIMIT,
) -> tuple[Tensors, list[Buffer]]:
    """Put `arrays` of chunk `seq` where they belong; the references, and the frames to send along.

    Up to `inline_limit` bytes an array rides as a frame; so do larger ones for which the arena has no
    room. Those frames may alias the arrays: send before changing them. Raises `TypeError`, before any
    lease is taken, for a dtype that cannot be sent.
    """
    for array in arrays.values():
        dtype_name(array.dtype)
    tensors: Tensors = {}
    frames: list[Buffer] = []
    for name, array in arrays.items():
        large = arena is not None and array.nbytes > inline_limit
        ref = arena.put(request, seq, array) if arena is not None and large else None
        if ref is None:
            ref = TensorRef(dtype_name(array.dtype), array.shape, frame=len(frames))
            frames.append(_as_frame(array))
        tensors[name] = ref
    return tensors, frames


def unpack(tensors: Tensors, frames: Sequence[Buffer], reader: ArenaReader | None) -> dict[str, NDArray[Any]]:
    """Read-only arrays over the frames and arenas, without a copy.

    Raises `ValueError` for a reference that fits neither, `FileNotFoundError` for an arena that is gone.
    """
    return {name: _array(ref, frames, reader) for name, ref in tensors.items()}


def _as_frame(array: NDArray[Any]) -> Buffer:
    if array.nbytes <= INLINE_LIMIT and array.dtype.isnative:
        return array.tobytes()
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return native.reshape(-1).view(np.uint8).data if native.size else b""


def _array(ref: TensorRef, frames: Sequence[Buffer], reader: ArenaReader | None) -> NDArray[Any]:
    if ref.segment:
        if reader is None:
            raise ValueError("there is no shared memory here")
        return reader.view(ref)
    if not 0 <= ref.frame < len(frames):
        raise ValueError(f"frame {ref.frame} of {len(frames)} does not exist")
    frame = memoryview(frames[ref.frame])
    if frame.nbytes != nbytes(ref):
        raise ValueError(f"a frame of {frame.nbytes} bytes is not a {ref.dtype} tensor of shape {ref.shape}")
    array = as_array(ref, frame, 0)
    # ZeroMQ lays frames anywhere; libraries that take the array over expect whole elements.
    return array if array.flags.aligned else _read_only(array.copy())


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
