"""`omni-async bench`: how a running server does: time to first audio, real-time factor, throughput."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

from omni_async.cli import flags
from omni_async.errors import ConfigError, StageFailed

TEXT = "The quick brown fox jumps over the lazy dog while seven small birds watch from the old wooden fence."


def main(argv: Sequence[str]) -> int:
    """Send `--requests` streamed speech requests from `--clients` clients and print what they saw."""
    parser = flags.Parser(prog="omni-async bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", default="http://127.0.0.1:8091")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--api-key")
    args = parser.parse_args(argv)
    if args.clients < 1 or args.requests < 1:
        raise ConfigError("--clients and --requests must be at least 1.")
    asyncio.run(bench(args.url, args.clients, args.requests, args.text, args.api_key))
    return 0


async def bench(url: str, clients: int, requests: int, text: str, key: str | None) -> None:
    """Measure, and print one line per figure."""
    try:
        import httpx
    except ImportError:
        raise ConfigError("omni-async bench needs httpx: pip install httpx.") from None
    body = {"input": text, "response_format": "pcm", "stream": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    left = iter(range(requests))
    firsts: list[float] = []
    factors: list[float] = []
    seconds = 0.0

    async def client(http: httpx.AsyncClient) -> None:
        nonlocal seconds
        for _ in left:
            began, first, size, rate = time.perf_counter(), 0.0, 0, 24000
            async with http.stream("POST", "/v1/audio/speech", json=body) as answer:
                if answer.status_code != 200:
                    raise StageFailed(f"{url} answered {answer.status_code}: {(await answer.aread()).decode()}")
                rate = int(answer.headers["x-sample-rate"])
                async for data in answer.aiter_raw():
                    first = first or time.perf_counter() - began
                    size += len(data)
            audio = size / 2 / rate
            firsts.append(first)
            factors.append((time.perf_counter() - began) / audio)
            seconds += audio

    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600) as http:
        began = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(clients)))
        elapsed = time.perf_counter() - began
    print(f"{requests} requests, {clients} clients: {requests / elapsed:.2f} requests/s")
    print(f"time to first audio: median {statistics.median(firsts) * 1000:.0f} ms, worst {max(firsts) * 1000:.0f} ms")
    print(f"real-time factor: median {statistics.median(factors):.4f}, worst {max(factors):.4f}")
    print(f"audio: {seconds / elapsed:.1f} s made per second")
