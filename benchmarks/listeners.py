"""How many listeners can one machine make happy? `python -m benchmarks.listeners`.

Listeners arrive at random (Poisson, the same arrivals for every policy) and each plays what it gets at
1×. One is content when it hears the first audio within 0.5 s and never runs dry after that. For each
scheduling policy of the stages the rate is sought up to which 99 % are content.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from typing import Any

import httptools
import uvloop

from benchmarks.report import goal, save, table
from benchmarks.servers import ours, serving

POLICIES = ("due", "fcfs", "round_robin")
LENGTHS = (1, 2, 4)
SENTENCE = "Number {} of the listeners hears a sentence of ten words here."
ARRIVING, PATIENCE = 20.0, 40.0
FIRST_AUDIO, CONTENT, CLOSE_ENOUGH = 0.5, 0.99, 0.06
RATE = 24000
SLOTS = ("--stage-0-max-num-seqs", "512", "--stage-1-max-num-seqs", "512", "--max-queue", "2048")


class Listener:
    """Plays at 1× from the first audio on; knows when it heard that, and how long it stood silent."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.first: float | None = None
        self.ends = 0.0
        self.silent = 0.0
        self.done = False

    def on_body(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.first is None:
            self.first, self.ends = now - self.began, now
        self.silent += max(0.0, now - self.ends)
        self.ends = max(self.ends, now) + len(data) / 2 / RATE

    def on_message_complete(self) -> None:
        self.done = True

    @property
    def content(self) -> bool:
        """First audio soon, all of it, and no gap."""
        return self.done and self.first is not None and self.first <= FIRST_AUDIO and self.silent == 0.0


async def listen(port: int, text: str) -> Listener:
    """One listener, from its connection to its last byte or the end of its patience."""
    body = json.dumps({"input": text, "response_format": "pcm", "stream": True}).encode()
    head = (
        "POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    listener = Listener()
    parser = httptools.HttpResponseParser(listener)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    try:
        async with asyncio.timeout(PATIENCE):
            while not listener.done and (data := await reader.read(1 << 16)):
                parser.feed_data(data)
    except TimeoutError:
        pass
    writer.close()
    return listener


async def crowd(port: int, rate: float) -> dict[str, float]:
    """Arrivals at `rate` a second, and how it went for them."""
    chance = random.Random(7)
    at, tasks = 0.0, []
    began = time.perf_counter()
    while at < ARRIVING:
        at += chance.expovariate(rate)
        words = " ".join(SENTENCE.format(chance.randrange(10, 99)) for _ in range(chance.choice(LENGTHS)))
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        tasks.append(asyncio.create_task(listen(port, words)))
    heard = await asyncio.gather(*tasks)
    firsts = sorted(listener.first if listener.first is not None else PATIENCE for listener in heard)
    return {
        "rate": rate,
        "listeners": len(heard),
        "content": sum(listener.content for listener in heard) / len(heard),
        "first_p95": firsts[int(0.95 * len(firsts))],
        "with_gaps": sum(listener.silent > 0 for listener in heard) / len(heard),
    }


def trial(port: int, rate: float) -> dict[str, float]:
    """A crowd in a process of its own."""
    args = [sys.executable, "-m", "benchmarks.listeners", str(port), str(rate)]
    return json.loads(subprocess.run(args, check=True, capture_output=True, text=True).stdout)


def sought(policy: str) -> list[dict[str, float]]:
    """Trials by bisection, from a rate that is too low to one that is too high."""
    flags = [word for i in (0, 1) for word in (f"--stage-{i}-scheduling-policy", policy)]
    trials: list[dict[str, float]] = []
    with serving(policy, ours("hibari", *flags, *SLOTS), "/v1/audio/speech", {"input": "Hi."}) as server:
        trial(server.port, 2.0)
        low, high, rate = 0.0, 0.0, 8.0
        while not high or high / max(low, 0.1) > 1 + CLOSE_ENOUGH:
            trials.append(trial(server.port, rate))
            if trials[-1]["content"] >= CONTENT:
                low = rate
            else:
                high = rate
            rate = (low + high) / 2 if high else rate * 1.5
            if rate < 0.5:
                break
    return sorted(trials, key=lambda row: row["rate"])


def main() -> None:
    """All policies, one after the other."""
    found = {policy: sought(policy) for policy in POLICIES}
    rows: list[tuple[Any, ...]] = [
        (
            policy,
            t["rate"],
            int(t["listeners"]),
            100 * t["content"],
            1000 * t["first_p95"],
            100 * t["with_gaps"],
        )
        for policy, trials in found.items()
        for t in trials
    ]
    table(
        "listeners", ("policy", "arrivals/s", "listeners", "% content", "first p95 ms", "% with gaps"), rows
    )
    best = {
        policy: max((t["rate"] for t in trials if t["content"] >= CONTENT), default=0.0)
        for policy, trials in found.items()
    }
    table("rate at which 99 % are content", ("policy", "arrivals/s"), list(best.items()))
    print()
    ratio = best["due"] / max(best["fcfs"], best["round_robin"], 0.1)
    met = goal("rate with due times, of the better other policy", ratio, 1.5, at_least=True)
    save("listeners", {"trials": found, "best": best, "goals": [met]})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(uvloop.run(crowd(int(sys.argv[1]), float(sys.argv[2])))))
    else:
        main()
