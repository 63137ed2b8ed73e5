"""A blocking call that can be stopped and resumed at points inside it: a thread that runs only while its
owner waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Cancelled(BaseException):
    """Raised at the next point inside a call that is no longer wanted."""


class Coroutine:
    """`work(pause)` in a thread; each call of `pause` inside it ends one `resume` outside.

    Never do two threads run at once, so that what the work shares with others needs no lock.
    """

    def __init__(self, work: Callable[[Callable[[], None]], Any]) -> None:
        self._work = work
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._cancelled = False
        self._thread: threading.Thread | None = None
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs any more."""
        return self._thread is not None and not self._thread.is_alive()

    def resume(self) -> None:
        """Let it run until its next pause or its end. Raises what the work raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._go.release()
        self._paused.acquire()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """End it where it stands; returns when the thread has ended."""
        if self._thread is not None and not self.done:
            self._cancelled = True
            self._go.release()
            self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            self.result = self._work(self._pause)
        except Cancelled:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._paused.release()

    def _pause(self) -> None:
        self._paused.release()
        self._go.acquire()
        if self._cancelled:
            raise Cancelled
