"""Threads in which media is encoded, so that the event loop never waits for a codec."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_async.api.audio_encoder import AudioEncoder, Float
    from omni_async.api.media_plan import MediaPlan

log = logging.getLogger(__name__)

T = TypeVar("T")
# Converting a second of samples to 16 bit takes 50 µs, less than a change of threads and back.
_CHEAP_SAMPLES = 48_000


class MediaPool:
    """Makes encoders and runs them. An encoder's calls follow each other, whichever thread has them."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="omni-media")
        self._closed = False

    def warm(self) -> None:
        """Load the codecs and resampler now and not in the first request."""
        from omni_async.api import audio_encoder

        assert audio_encoder

    def encoding(self, plan: MediaPlan, *, streaming: bool) -> Encoding:
        """A new encoding of audio by `plan`."""
        from omni_async.api.audio_encoder import make_encoder

        cheap = plan.format in ("pcm", "wav") and plan.rate == plan.source_rate
        return Encoding(self, make_encoder(plan, streaming=streaming), cheap=cheap)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, run in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def start(self, work: Callable[[], None]) -> None:
        """Have `work` run in a thread, or here when the threads have ended, without waiting for it."""
        if self._closed:
            work()
            return
        self._threads.submit(work).add_done_callback(_log_failure)

    def close(self) -> None:
        """Let the threads end."""
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)


def _log_failure(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("closing an encoder failed", exc_info=error)


class Encoding:
    """One answer's audio on its way to bytes."""

    def __init__(self, pool: MediaPool, encoder: AudioEncoder, *, cheap: bool) -> None:
        self._pool = pool
        self._encoder = encoder
        self._cheap = cheap
        self._lock = threading.Lock()
        self._finished = False
        self.samples = 0

    async def push(self, pcm: Float) -> bytes:
        """Bytes that are ready after `pcm`; may be empty."""
        self.samples += len(pcm)
        if self._cheap and len(pcm) <= _CHEAP_SAMPLES:
            return self._encoder.push(pcm)
        return await self._pool.run(self._locked(lambda: self._encoder.push(pcm)))

    async def finish(self) -> bytes:
        """The rest, container closed."""
        if self._cheap and self.samples <= _CHEAP_SAMPLES:
            data = self._encoder.finish()
        else:
            data = await self._pool.run(self._locked(self._encoder.finish))
        self._finished = True
        return data

    def close(self) -> None:
        """Free what an encoding that is broken off holds; a call that is under way ends first."""
        if not self._finished:
            self._pool.start(self._locked(self._encoder.close))

    def _locked(self, work: Callable[[], T]) -> Callable[[], T]:
        # A cancelled request may still have a call under way in one thread when `close` runs in another.
        def run() -> T:
            with self._lock:
                return work()

        return run
