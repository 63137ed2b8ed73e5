"""How often, and how soon, a worker that died is started again."""

from __future__ import annotations

from collections import deque

WINDOW = 300.0
FIRST_DELAY = 0.1
LONGEST_DELAY = 10.0


class RestartBudget:
    """At most `budget` restarts within five minutes, each after twice the delay of the one before."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.total = 0
        self._times: deque[float] = deque()

    def next_delay(self, now: float) -> float | None:
        """Seconds to wait before the next start; None when the budget is spent."""
        while self._times and now - self._times[0] > WINDOW:
            self._times.popleft()
        if len(self._times) >= self.budget:
            return None
        self._times.append(now)
        self.total += 1
        return min(LONGEST_DELAY, FIRST_DELAY * 2 ** (len(self._times) - 1))
