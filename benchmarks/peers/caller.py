"""The engine's side of one worker: `python -m benchmarks.peers.caller ADDRESS`.

For each line `REQUESTS TOKENS` on standard input it submits that many prompts, gives a credit for each
output as the scheduler does, tells the worker to stop when all have ended, and prints a line.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from benchmarks.language import prompt_ids
from omni_async.messages import Credit, Output, Stop, Submit, WorkerMessage
from omni_async.transports.zeromq import AsyncZmqChannel

WINDOW = 64


async def main(address: str) -> None:
    """Until standard input ends."""
    channel = AsyncZmqChannel(address)
    ended = asyncio.Semaphore(0)

    def receive(message: WorkerMessage, frames: Sequence[memoryview]) -> None:
        if not isinstance(message, Output):
            raise TypeError(f"unexpected: {message}")
        if message.final:
            ended.release()
        else:
            channel.send(Credit(request=message.request, upto=message.seq + 1, due_in=0.0))

    channel.start(receive)
    while line := await asyncio.to_thread(sys.stdin.readline):
        requests, tokens = map(int, line.split())
        for number in range(requests):
            params = {
                "prompt_token_ids": prompt_ids(number),
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0,
            }
            channel.send(Submit(request=number, params=params, seed=0, window=WINDOW, due_in=0.0))
        for _ in range(requests):
            await ended.acquire()
        channel.send(Stop())
        print("done", flush=True)
    channel.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
