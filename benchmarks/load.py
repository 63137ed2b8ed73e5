"""A closed-loop HTTP client that costs little: each client sends its next request when it has its answer.

`python -m benchmarks.load URL BODY CLIENTS SECONDS` prints one JSON object. BODY may be a list, of which each
client sends one after the other, from a place of its own. It runs as a process of its
own, so that its event loop is not the one that is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httptools
import uvloop


class Answer:
    """What the parser says of one answer."""

    def __init__(self) -> None:
        self.first = 0.0
        self.bytes = 0
        self.done = False

    def on_body(self, data: bytes) -> None:
        self.first = self.first or time.perf_counter()
        self.bytes += len(data)

    def on_message_complete(self) -> None:
        self.done = True


async def ask(
    host: str, port: int, requests: Iterator[bytes], until: float, seen: list[tuple[float, ...]]
) -> int:
    """Requests on one connection until the time is up; the number that did not get a 200."""
    reader, writer = await asyncio.open_connection(host, port)
    errors = 0
    while time.perf_counter() < until:
        began = time.perf_counter()
        writer.write(next(requests))
        answer = Answer()
        parser = httptools.HttpResponseParser(answer)
        while not answer.done:
            data = await reader.read(1 << 18)
            if not data:
                raise ConnectionError("the server closed the connection in mid-answer")
            parser.feed_data(data)
        if parser.get_status_code() != 200:
            errors += 1
            continue
        end = time.perf_counter()
        seen.append((answer.first - began, end - began, answer.bytes))
    writer.close()
    return errors


def encoded(path: str, body: Any) -> bytes:
    """One request."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def run(url: str, body: Any, clients: int, seconds: float) -> dict[str, Any]:
    """Figures of all clients: rates per second, times in milliseconds."""
    parts = urlsplit(url)
    assert parts.hostname == "127.0.0.1"
    assert parts.port is not None
    requests = [encoded(parts.path, each) for each in (body if isinstance(body, list) else [body])]
    seen: list[tuple[float, ...]] = []
    began = time.perf_counter()
    turns = [
        itertools.cycle(requests[i % len(requests) :] + requests[: i % len(requests)]) for i in range(clients)
    ]
    tasks = [ask(parts.hostname, parts.port, turn, began + seconds, seen) for turn in turns]
    errors = sum(await asyncio.gather(*tasks))
    elapsed = time.perf_counter() - began
    firsts, totals = (sorted(1000 * row[i] for row in seen) for i in (0, 1))
    return {
        "requests_per_second": len(seen) / elapsed,
        "first_p50": percentile(firsts, 0.5),
        "first_p95": percentile(firsts, 0.95),
        "total_p50": percentile(totals, 0.5),
        "total_p95": percentile(totals, 0.95),
        "total_p99": percentile(totals, 0.99),
        "bytes_each": sum(row[2] for row in seen) / max(1, len(seen)),
        "requests": len(seen),
        "errors": errors,
    }


def percentile(ordered: list[float], share: float) -> float:
    """Of an ordered list."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def load(url: str, body: Any, clients: int, seconds: float) -> dict[str, Any]:
    """Run it as a process."""
    args = [sys.executable, "-m", "benchmarks.load", url, json.dumps(body), str(clients), str(seconds)]
    done = subprocess.run(args, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    url, body, clients, seconds = sys.argv[1:]
    print(json.dumps(uvloop.run(run(url, json.loads(body), int(clients), float(seconds)))))
