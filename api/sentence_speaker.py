"""Speaks the sentences of a session in order, the next one under way while one is sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from itertools import islice

from omni_async.api.config import ApiConfig

Pieces = Callable[[int, str], AsyncGenerator[bytes, None]]


class Sentence:
    """A sentence being made: its frames wait in a bounded queue, so a slow reader slows its own request."""

    def __init__(self, index: int, text: str, window: int) -> None:
        self.index = index
        self.text = text
        self.error: Exception | None = None
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue(window)
        self._task: asyncio.Task[None] | None = None

    def start(self, pieces: Pieces) -> None:
        """Begin to make it, unless that is so already."""
        if self._task is None:
            self._task = asyncio.create_task(self._make(pieces(self.index, self.text)))

    async def _make(self, pieces: AsyncGenerator[bytes, None]) -> None:
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    await self._frames.put(piece)
        except Exception as error:
            self.error = error  # told to the client by whoever takes the frames
        await self._frames.put(None)

    async def next_frame(self) -> bytes | None:
        """The next frame; None at the end, or when `error` has ended it."""
        return await self._frames.get()

    async def stop(self) -> None:
        """Cancel the request behind it, and wait until that is done."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


class SentenceSpeaker:
    """Says one sentence after the other; at most `ws_read_ahead` are being made.

    `say(sentence)` sends it; cancelled, it closes what it has begun to send. `ended(sentence)` is told
    when one has been said to its end, and may call `silence`.
    """

    def __init__(
        self,
        config: ApiConfig,
        pieces: Pieces,
        say: Callable[[Sentence], Coroutine[None, None, None]],
        ended: Callable[[Sentence], Awaitable[None]],
    ) -> None:
        self._config = config
        self._pieces = pieces
        self._say = say
        self._ended = ended
        self._waiting: deque[Sentence] = deque()
        self._more = asyncio.Event()
        self._saying: asyncio.Task[None] | None = None

    def add(self, index: int, text: str) -> None:
        """Speak `text` after all that was added before."""
        self._waiting.append(Sentence(index, text, self._config.ws_frame_window))
        self._start_ahead()
        self._more.set()

    def _start_ahead(self) -> None:
        for sentence in islice(self._waiting, self._config.ws_read_ahead):
            sentence.start(self._pieces)

    async def run(self) -> None:
        """Speak until cancelled, or until `say` or `ended` raises."""
        try:
            while True:
                await self._more.wait()
                while self._waiting:
                    await self._speak_first()
                self._more.clear()
        finally:
            await self.silence()

    async def _speak_first(self) -> None:
        sentence = self._waiting[0]
        self._saying = asyncio.create_task(self._say(sentence))
        await asyncio.wait({self._saying})
        if self._saying.cancelled():
            return
        self._saying.result()
        if self._waiting and self._waiting[0] is sentence:
            self._waiting.popleft()
        self._start_ahead()
        await self._ended(sentence)

    async def silence(self) -> None:
        """Stop what is being said and made, forget the rest, and wait until the requests are cancelled."""
        stopped, self._waiting = self._waiting, deque()
        saying = self._saying
        if saying is not None and not saying.done():
            saying.cancel()
            await asyncio.wait({saying})
        for sentence in stopped:
            await sentence.stop()
        if saying is not None and not saying.cancelled():
            saying.result()
