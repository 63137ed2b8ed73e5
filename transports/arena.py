"""Shared memory that one process writes and others read: leases of tensors in a file that is mapped.

The producer alone allocates and frees. It frees when the consumers' credit says that they are done,
so no lock and no count is shared between processes.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omni_async.messages import TensorRef
from omni_async.transports.free_list import FreeList, aligned
from omni_async.transports.run_dir import in_shared_memory

SUFFIX = ".arena"
KINDS = "biufc"
"""Kinds of dtype that mean the same bytes in every process: bool, integers, floats, complex."""

FIRST_GROWTH = 4 * 1024 * 1024
"""Bytes of the first reservation; later ones double, so that few mappings are made anew."""

NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


class Lease(NamedTuple):
    """Bytes in use until the consumers are done with chunk `seq` of the request."""

    seq: int
    offset: int
    size: int


class Arena:
    """The producer's end; belongs to one thread. `capacity` is the most it will take, in bytes.

    The file is made and grown when it is needed. Its space is really reserved: in a small /dev/shm,
    `put` finds no room, where a sparse file would end the process by SIGBUS.
    """

    def __init__(self, run_dir: Path, name: str, capacity: int) -> None:
        self._run_dir = run_dir
        # Never a name again that a reader may still have mapped from an earlier owner.
        self._segment = f"{name}.{secrets.token_hex(4)}{SUFFIX}"
        self._capacity = capacity if in_shared_memory(run_dir) else 0
        self._fd: int | None = None
        self._map: mmap.mmap | None = None
        self._space = FreeList()
        self._leases: dict[int, list[Lease]] = {}
        self._closed = False

    @property
    def reserved(self) -> int:
        """Bytes of shared memory taken from the system."""
        return self._space.size

    @property
    def used(self) -> int:
        """Bytes under lease."""
        return self._space.size - self._space.free

    def put(self, request: int, seq: int, array: NDArray[Any]) -> TensorRef | None:
        """Copy `array` (any layout) in and lease it to chunk `seq`; None when there is no room.

        Raises `TypeError` for a dtype that is not bool, integer, float or complex.
        """
        name = dtype_name(array.dtype)
        if self._closed:
            return None
        size = aligned(array.nbytes)
        offset = self._space.take(size)
        if offset is None:
            if not self._grow(size - self._space.tail):
                return None
            offset = self._space.take(size)
        assert offset is not None
        assert self._map is not None
        self._leases.setdefault(request, []).append(Lease(seq, offset, size))
        target = np.ndarray(array.shape, array.dtype.newbyteorder("="), self._map, offset)
        target[...] = array
        return TensorRef(name, array.shape, segment=self._segment, offset=offset)

    def release(self, request: int, upto: int) -> None:
        """Free what the request's chunks below `upto` hold; an unknown request holds nothing."""
        leases = self._leases.pop(request, [])
        if kept := [lease for lease in leases if lease.seq >= upto]:
            self._leases[request] = kept
        self._free(lease for lease in leases if lease.seq < upto)

    def drop(self, request: int) -> None:
        """Free all that the request holds."""
        self._free(self._leases.pop(request, []))

    def _free(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._space.give(lease.offset, lease.size)

    def close(self) -> None:
        """Unlink the file. Readers that have it mapped keep what they have."""
        if self._fd is not None:
            (self._run_dir / self._segment).unlink(missing_ok=True)
            os.close(self._fd)
        self._fd = self._map = None
        self._leases.clear()
        self._space = FreeList()
        self._closed = True

    def check(self) -> None:
        """Invariants: leases do not overlap, and with the holes they make up the whole file."""
        self._space.check()
        spans = sorted((lease.offset, lease.size) for held in self._leases.values() for lease in held)
        for (offset, size), (following, _) in pairwise(spans):
            assert offset + size <= following, "two leases overlap"
        assert all(self._leases.values()), "a request without leases is remembered"
        assert sum(size for _, size in spans) == self.used, "bytes are neither leased nor free"
        assert self._space.size <= self._capacity
        assert self._fd is None or os.fstat(self._fd).st_size == self._space.size

    def _grow(self, need: int) -> bool:
        """Reserve at least `need` bytes more, better twice of what there is."""
        size, left = self._space.size, self._capacity - self._space.size
        if need > left:
            return False
        wished = min(max(need, size or FIRST_GROWTH), left - left % mmap.PAGESIZE)
        return any(self._reserve(by) for by in dict.fromkeys((wished, need)) if by >= need)

    def _reserve(self, by: int) -> bool:
        # Asked first, because a reservation that fails half-way fills the memory before it gives up.
        # (A file system without a limit of its own tells of no blocks at all.)
        room = os.statvfs(self._run_dir)
        if room.f_blocks and by > room.f_bavail * room.f_frsize:
            return False
        if self._fd is None:
            self._fd = _create(self._run_dir, self._segment)
        size = self._space.size
        try:
            os.posix_fallocate(self._fd, size, by)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        self._map = mmap.mmap(self._fd, size + by, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._space.grow(by)
        return True


@lru_cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """What `TensorRef` calls `dtype`. Raises `TypeError` for one whose arrays cannot be sent."""
    # Cached: numpy puts the name together anew each time, which costs as much as a small copy.
    if dtype.kind not in KINDS:
        raise TypeError(f"arrays of {dtype} cannot be sent; only bool, integers, floats and complex")
    return dtype.name


def _create(run_dir: Path, segment: str) -> int:
    """Make the file, locked for the owner's life, and remove those whose owner was killed.

    It gets its name after its lock, or another process that does the same would take it for abandoned.
    """
    draft = run_dir / f"{segment}.new"
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    draft.rename(run_dir / segment)
    _reap(run_dir)
    return fd


def _reap(run_dir: Path) -> None:
    for path in run_dir.glob(f"*{SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            continue
        finally:
            os.close(fd)
