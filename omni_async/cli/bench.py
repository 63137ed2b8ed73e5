"""`omni-async bench`: how a running server does under several listeners at once."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from omni_async.cli import flags
from omni_async.errors import ConfigError, OmniError

TEXT = "The quick brown fox jumps over the lazy dog while seven small birds watch from the old wooden fence."
TIMEOUT = 600.0


class Heard(NamedTuple):
    """One streamed answer: seconds until its first byte and its last, and seconds of audio in it."""

    first: float
    total: float
    audio: float


def main(argv: Sequence[str]) -> int:
    """Send `--requests` streamed speech requests from `--clients` clients and print what they saw."""
    parser = flags.Parser("bench", "Measure a running server.")
    parser.add_argument("--url", default="http://127.0.0.1:8091", help="the server (default %(default)s)")
    parser.add_argument("--clients", type=int, default=4, help="requests under way at once (default 4)")
    parser.add_argument("--requests", type=int, default=32, help="requests in all (default 32)")
    parser.add_argument("--text", default=TEXT, help="what is to be spoken")
    parser.add_argument("--api-key", help="the server's key, if it asks for one")
    args = parser.parse_args(argv)
    if args.clients < 1 or args.requests < 1:
        raise ConfigError("--clients and --requests must be at least 1.")
    began = time.perf_counter()
    heard = asyncio.run(listen(args.url, args.clients, args.requests, args.text, args.api_key))
    _report(heard, time.perf_counter() - began, args.clients)
    return 0


async def listen(url: str, clients: int, requests: int, text: str, key: str | None) -> list[Heard]:
    """All answers, in the order in which they ended. Raises `OmniError` when one is not 200."""
    try:
        import httpx
    except ImportError:
        raise ConfigError("omni-async bench needs httpx: pip install httpx.") from None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    left = iter(range(requests))
    heard: list[Heard] = []
    try:
        async with (
            httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT) as http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(clients):
                group.create_task(_client(http, text, left, heard))
    except* httpx.TransportError as errors:
        raise OmniError(f"{url} does not answer: {errors.exceptions[0]}.") from None
    except* OmniError as errors:
        raise errors.exceptions[0] from None
    return heard


async def _client(http: Any, text: str, left: Iterator[int], heard: list[Heard]) -> None:
    body = {"input": text, "response_format": "pcm", "stream": True}
    for _ in left:
        began, first, size = time.perf_counter(), 0.0, 0
        async with http.stream("POST", "/v1/audio/speech", json=body) as answer:
            if answer.status_code != 200:
                raise OmniError(
                    f"The server answered {answer.status_code}: {(await answer.aread()).decode()}"
                )
            rate = int(answer.headers["x-sample-rate"])
            async for data in answer.aiter_raw():
                first = first or time.perf_counter() - began
                size += len(data)
        heard.append(Heard(first, time.perf_counter() - began, size / 2 / rate))


def _report(heard: Sequence[Heard], elapsed: float, clients: int) -> None:
    firsts = [answer.first * 1000 for answer in heard]
    factors = [answer.total / answer.audio for answer in heard]
    print(f"{len(heard)} requests, {clients} clients: {len(heard) / elapsed:.2f} requests/s")
    print(f"time to first audio: median {statistics.median(firsts):.0f} ms, worst {max(firsts):.0f} ms")
    print(f"real-time factor: median {statistics.median(factors):.4f}, worst {max(factors):.4f}")
    print(f"audio: {sum(answer.audio for answer in heard) / elapsed:.1f} s made per second")
