"""Which bytes of a region are free: first fit, coalescing. Offsets only, no memory."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64
"""A cache line, and the widest vector load: every offset and size is a multiple of it."""


def aligned(size: int) -> int:
    """`size` rounded up to the alignment, and at least one unit."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


class FreeList:
    """The free holes of `[0, size)`, lowest first: low offsets are used again soonest, while warm."""

    def __init__(self) -> None:
        self.size = 0
        self._holes: list[tuple[int, int]] = []

    @property
    def free(self) -> int:
        """Free bytes in all holes."""
        return sum(size for _, size in self._holes)

    @property
    def tail(self) -> int:
        """Free bytes at the very end, which growth would extend."""
        if not self._holes or sum(self._holes[-1]) < self.size:
            return 0
        return self._holes[-1][1]

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes (a multiple of the alignment), or None when no hole is wide enough."""
        for index, (offset, width) in enumerate(self._holes):
            if width >= size:
                self._holes[index : index + 1] = [(offset + size, width - size)] if width > size else []
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Free what `take` returned. Raises `ValueError` when it is not wholly in use."""
        if size <= 0 or offset < 0 or offset + size > self.size:
            raise ValueError(f"[{offset}, {offset + size}) is not in the region")
        index = bisect_left(self._holes, (offset, 0))
        before = self._holes[index - 1] if index else None
        after = self._holes[index] if index < len(self._holes) else None
        if (before and sum(before) > offset) or (after and after[0] < offset + size):
            raise ValueError(f"[{offset}, {offset + size}) is free already")
        first, last, start, end = index, index, offset, offset + size
        if before and sum(before) == offset:
            first, start = index - 1, before[0]
        if after and after[0] == end:
            last, end = index + 1, sum(after)
        self._holes[first:last] = [(start, end - start)]

    def grow(self, by: int) -> None:
        """Add `by` free bytes (a multiple of the alignment) at the end."""
        self.size += by
        self.give(self.size - by, by)

    def check(self) -> None:
        """Invariants: holes are aligned, in order, apart from each other, inside the region."""
        end = -1
        for offset, size in self._holes:
            assert size > 0
            assert offset % ALIGNMENT == size % ALIGNMENT == 0
            assert offset > end, "two holes touch or overlap"
            end = offset + size
        assert end <= self.size
