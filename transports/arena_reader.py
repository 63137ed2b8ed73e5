"""The consumers' end of arenas: read-only views into files that other processes own."""

from __future__ import annotations

import math
import mmap
import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_async.messages import TensorRef
from omni_async.transports.arena import KINDS
from omni_async.transports.channel import Buffer


class _Mapping(NamedTuple):
    fd: int
    memory: mmap.mmap


class ArenaReader:
    """Maps the arenas of one server's run folder on first use and keeps the maps until `close`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._mappings: dict[str, _Mapping] = {}

    def view(self, ref: TensorRef) -> NDArray[Any]:
        """The tensor as a read-only array without a copy.

        The bytes are the request's until its lease is released; then the owner writes others there.
        Raises `ValueError` for a reference that does not lie in an arena of the run folder, and
        `FileNotFoundError` when the arena is gone.
        """
        end = ref.offset + nbytes(ref)
        if ref.offset < 0:
            raise ValueError(f"offset {ref.offset} is not in an arena")
        return as_array(ref, self._memory(ref.segment, end), ref.offset)

    def close(self) -> None:
        """Forget the maps. Memory of views that are still held is freed with them."""
        for name in list(self._mappings):
            self._forget(name)

    def _memory(self, name: str, end: int) -> mmap.mmap:
        known = self._mappings.get(name)
        if known is not None and end <= len(known.memory):
            return known.memory
        fd = self._open(name) if known is None else known.fd
        # The owner may have grown the file since; earlier views keep the earlier map.
        size = os.fstat(fd).st_size
        if end > size or size == 0:
            if known is None:
                os.close(fd)
            raise ValueError(f"byte {end} is beyond the end of arena {name!r}")
        memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        self._mappings[name] = _Mapping(fd, memory)
        return memory

    def _open(self, name: str) -> int:
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise ValueError(f"{name!r} is not the name of an arena")
        self._forget_unlinked()
        try:
            # Neither a link out of the folder, nor a pipe that would wait for its other end.
            fd = os.open(self._run_dir / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ValueError(f"{name!r} is not an arena: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ValueError(f"{name!r} is not an arena")
        return fd

    def _forget_unlinked(self) -> None:
        """Let go of arenas whose owners have left; the moment is a new owner's first tensor."""
        for name, mapping in list(self._mappings.items()):
            if os.fstat(mapping.fd).st_nlink == 0:
                self._forget(name)

    def _forget(self, name: str) -> None:
        # Not closed but dropped: views may be held, and each of them keeps the map alive.
        os.close(self._mappings.pop(name).fd)


def nbytes(ref: TensorRef) -> int:
    """Bytes of the tensor. Raises `ValueError` for a dtype or shape that cannot be."""
    if any(length < 0 for length in ref.shape):
        raise ValueError(f"shape {ref.shape} has a negative length")
    return math.prod(ref.shape) * _dtype(ref.dtype).itemsize


def as_array(ref: TensorRef, buffer: Buffer | mmap.mmap, offset: int) -> NDArray[Any]:
    """A read-only array over `buffer`. Raises `ValueError` when the tensor does not fit in it."""
    try:
        array = np.ndarray(ref.shape, _dtype(ref.dtype), buffer, offset)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{ref} does not fit its buffer: {error}") from error
    array.flags.writeable = False
    return array


@lru_cache
def _dtype(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except (TypeError, SyntaxError) as error:
        raise ValueError(f"{name!r} is not a dtype") from error
    if dtype.kind not in KINDS:
        raise ValueError(f"tensors of {name!r} are not sent")
    return dtype
