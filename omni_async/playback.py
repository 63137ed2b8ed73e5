"""The playback clock of one listener: when is its next chunk due?"""

from __future__ import annotations


class PlaybackClock:
    """A listener plays at 1× from the moment the first chunk of media arrives.

    Times are seconds on the caller's clock. A chunk that comes after the listener ran dry is an
    underrun: playback stalls for the gap and then goes on from there.
    """

    __slots__ = ("media", "started", "underrun", "_end")

    def __init__(self) -> None:
        self.media = 0.0
        self.underrun = 0.0
        self.started: float | None = None
        self._end = 0.0

    @property
    def due(self) -> float | None:
        """When the listener runs dry, or None before playback."""
        return None if self.started is None else self._end

    def add(self, duration: float, now: float) -> None:
        """A chunk of `duration` seconds of media was delivered at `now`."""
        if self.started is None:
            self.started = self._end = now
        elif now > self._end:
            self.underrun += now - self._end
            self._end = now
        self.media += duration
        self._end += duration
