"""Several streams as one, each item as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Pairs of a stream's number and an item of it. A stream waits until its item is taken.

    Raises the first error of any stream; then, and when this is closed, all of them are closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    ready: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.create_task(_pass_on(number, stream, ready)) for number, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(
    number: int, stream: AsyncGenerator[T, None], ready: asyncio.Queue[tuple[int, T] | Exception | None]
) -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await ready.put((number, item))
        await ready.put(None)
    except Exception as error:
        await ready.put(error)
