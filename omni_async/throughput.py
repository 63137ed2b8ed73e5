"""How fast requests finish, so that `Retry-After` tells the truth."""

from __future__ import annotations

from collections import deque


class Throughput:
    """The rate of the last `window` endings."""

    def __init__(self, window: int = 32) -> None:
        self._ends: deque[float] = deque(maxlen=window)

    def add(self, now: float) -> None:
        """A request finished at `now`, in seconds."""
        self._ends.append(now)

    def seconds_for(self, count: int) -> float:
        """Seconds until `count` more requests have finished; 1 at least, and 1 when nothing is known."""
        if len(self._ends) < 2:
            return 1.0
        each = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return max(1.0, count * each)
