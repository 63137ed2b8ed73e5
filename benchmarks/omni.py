"""How soon does a model that talks back begin to speak, and how many can it talk to? Beside transformers.

`python -m benchmarks.omni`: a random Qwen3-Omni of some 60 M parameters, every answer of the same length, one
thread a process; rounds are interleaved and medians count. The peer is transformers' `generate` behind a
lock: the whole answer is its first sound.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple

import httpx

from benchmarks.report import goal, save, table
from benchmarks.servers import PEER, Server, ours, serving
from tests.tiny.cache import built_once
from tests.tiny.omni import ENGINE, build_qwen3_omni

CLIENTS = (1, 4, 8)
ROUNDS = 3
TOKENS, FRAMES = 24, 100
SAMPLE_RATE = 24000
SIZES = {
    "hidden": 512,
    "layers": 6,
    "heads": 8,
    "width": 512,
    "groups": 8,
    "codec_hidden": 256,
    "decoder": 192,
    "upsample_rates": [8, 5, 4, 3],
}


class Job(NamedTuple):
    """Seconds to the first sound and to the end, and samples of sound."""

    first: float
    whole: float
    samples: int


def question(number: int) -> str:
    """Questions of several lengths."""
    return f"Question {number}: " + "what is it, and why? " * (1 + number % 4)


def body(number: int) -> dict[str, Any]:
    """A request to ours."""
    return {
        "model": "qwen3-omni",
        "messages": [{"role": "user", "content": question(number)}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "Ethan", "format": "pcm16"},
        "stream": True,
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "sampling_params_list": [{}, {"temperature": 0, "max_tokens": FRAMES + 1}],
    }


async def ask_ours(http: httpx.AsyncClient, server: Server, number: int) -> Job:
    """Stream one answer."""
    began, first, size = time.perf_counter(), 0.0, 0
    async with http.stream("POST", server.url("/v1/chat/completions"), json=body(number)) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                if data := (choice["delta"].get("audio") or {}).get("data"):
                    first = first or time.perf_counter() - began
                    size += len(data) * 3 // 4 - data.count("=")
    return Job(first, time.perf_counter() - began, size // 2)


async def ask_peer(http: httpx.AsyncClient, server: Server, number: int) -> Job:
    """One answer, which comes whole."""
    began = time.perf_counter()
    content = {"question": question(number), "tokens": TOKENS, "frames": FRAMES}
    answer = await http.post(server.url("/speak"), json=content)
    answer.raise_for_status()
    whole = time.perf_counter() - began
    return Job(whole, whole, len(answer.content) // 4)


async def crowd(server: Server, clients: int, asks: Any) -> tuple[list[Job], float]:
    """As many requests as clients at once, and the seconds until all are answered."""
    async with httpx.AsyncClient(timeout=300) as http:
        began = time.perf_counter()
        jobs = await asyncio.gather(*(asks(http, server, number) for number in range(clients)))
        return jobs, time.perf_counter() - began


def measure(servers: list[tuple[Server, Any]], clients: int) -> dict[str, dict[str, float]]:
    """Medians over rounds."""
    lengths: set[tuple[int, ...]] = set()
    seen: dict[str, list[dict[str, float]]] = {server.name: [] for server, _ in servers}
    for _ in range(ROUNDS):
        for server, asks in servers:
            cpu = server.cpu_seconds()
            jobs, seconds = asyncio.run(crowd(server, clients, asks))
            lengths.add(tuple(job.samples for job in jobs))
            audio = sum(job.samples for job in jobs) / SAMPLE_RATE
            seen[server.name].append(
                {
                    "first": median(job.first for job in jobs),
                    "job": median(job.whole for job in jobs),
                    "rtf": median(job.whole * SAMPLE_RATE / job.samples for job in jobs),
                    "audio/s": audio / seconds,
                    "audio/cpu s": audio / (server.cpu_seconds() - cpu),
                }
            )
    if len(lengths) != 1:
        raise RuntimeError(f"the answers differ in length: {lengths}")
    return {
        name: {key: median(each[key] for each in rounds) for key in rounds[0]}
        for name, rounds in seen.items()
    }


def main() -> None:
    """Measure, print and save."""
    folder = str(built_once("qwen3-omni-60m", lambda path: build_qwen3_omni(path, **SIZES)))
    with ExitStack() as stack:
        command = ours(folder, "--stage-0-engine-extras", json.dumps(ENGINE))
        first = {**body(0), "stream": False}
        mine = stack.enter_context(serving("omni_async", command, "/v1/chat/completions", first))
        probe: dict[str, object] = {"question": question(0), "tokens": 8, "frames": 8}
        command = ("-m", f"{PEER}.omni_peer", folder, "{port}")
        peer = stack.enter_context(serving("transformers", command, "/speak", probe))
        servers = [(mine, ask_ours), (peer, ask_peer)]
        results = {clients: measure(servers, clients) for clients in CLIENTS}
    rows = [
        [clients, name, *values.values()]
        for clients, each in results.items()
        for name, values in each.items()
    ]
    header = ["clients", "server", *next(iter(results[1].values()))]
    table("Text to text and speech; seconds, and seconds of audio a second", header, rows)
    lone, many = results[1]["omni_async"], results[8]
    goals = [
        goal("first audio / whole job, 1 client", lone["first"] / lone["job"], 0.3, at_least=False),
        goal(
            "throughput at 8 clients over transformers",
            many["omni_async"]["audio/s"] / many["transformers"]["audio/s"],
            3.0,
            at_least=True,
        ),
    ]
    save("omni", {"results": results, "goals": goals})


if __name__ == "__main__":
    main()
