"""How soon, how fast and how much speech? Ours beside the package itself and servers of the package.

`python -m benchmarks.speech`: the same 24 kHz English voice everywhere. Rounds are interleaved, medians
count; audio is counted per second of CPU of the whole server, whatever its processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.load import load
from benchmarks.peers.package import make
from benchmarks.report import goal, save, table
from benchmarks.servers import Server, litserve, mosec, ours, serving, starlette

SENTENCE = (
    "The {} brown fox jumps over the lazy dog while seven small birds watch quietly from the old wooden fence"
)
TWENTY = SENTENCE.format("quick") + "."
FORTY = SENTENCE.format("quick") + ", and the" + SENTENCE.format("slow")[3:] + "."
THREE = " ".join(SENTENCE.format(word) + "." for word in ("quick", "slow", "red"))
CLIENTS = (1, 4, 8, 16)
ROUNDS, SECONDS = 3, 5.0
OURS = "omni_async"
Figures = dict[str, dict[str, float]]


def package() -> dict[str, float]:
    """The package called directly, one request after the other, one thread; seconds."""
    voice = make()

    def timed(call: Callable[[], Any]) -> tuple[float, float]:
        wall, cpu = [], []
        for _ in range(12):
            began, used = time.perf_counter(), time.process_time()
            call()
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
        return median(wall), median(cpu)

    audio = len(voice(TWENTY)) / voice.sample_rate
    twenty, cpu = timed(lambda: voice(TWENTY))
    forty, _ = timed(lambda: voice(FORTY))
    three, _ = timed(lambda: next(voice.stream(THREE)))
    return {
        "audio": audio,
        "twenty_words": twenty,
        "forty_words": forty,
        "first_of_three": three,
        "real_time_factor": twenty / audio,
        "audio_per_cpu_second": audio / cpu,
    }


def ask(text: str, *, stream: bool) -> Callable[[Server], tuple[str, dict[str, Any]]]:
    """Where and what each server is asked."""

    def request(server: Server) -> tuple[str, dict[str, Any]]:
        if server.name == OURS:
            body = {"input": text, "response_format": "pcm", "stream": stream}
            return server.url("/v1/audio/speech"), body
        paths = {
            "starlette": "/stream" if stream else "/speech",
            "mosec": "/inference",
            "litserve": "/predict",
        }
        return server.url(paths[server.name]), {"text": text}

    return request


def measure(
    servers: Sequence[Server],
    request: Callable[[Server], tuple[str, dict[str, Any]]],
    clients: int,
    audio: float,
) -> Figures:
    """Medians over rounds."""
    seen: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    for _ in range(ROUNDS):
        for server in servers:
            cpu = server.cpu_seconds()
            found = load(*request(server), clients, SECONDS)
            assert not found["errors"], (server.name, found)
            found["audio_per_cpu_second"] = found["requests"] * audio / (server.cpu_seconds() - cpu)
            seen[server.name].append(found)
    return {name: {key: median(row[key] for row in rows) for key in rows[0]} for name, rows in seen.items()}


def peers(stack: ExitStack, kind: str) -> list[Server]:
    """The package served by others; mosec and LitServe with two workers, one for each core."""
    commands = {
        "starlette": (starlette("speech"), "/stream" if kind == "stream" else "/speech"),
        "mosec": (mosec(kind, 2), "/inference"),
        "litserve": (litserve(kind, 2), "/predict"),
    }
    return [
        stack.enter_context(serving(name, command, path, {"text": "Hi."}))
        for name, (command, path) in commands.items()
    ]


def main() -> None:
    """Direct calls, whole answers, streams."""
    direct = package()
    table("the package, called directly", ("", "value"), list(direct.items()))
    with ExitStack() as stack:
        mine = stack.enter_context(serving(OURS, ours("hibari"), "/v1/audio/speech", {"input": "Hi."}))
        servers = [mine, *peers(stack, "speech")]
        whole = {n: measure(servers, ask(TWENTY, stream=False), n, direct["audio"]) for n in CLIENTS}
    with ExitStack() as stack:
        mine = stack.enter_context(serving(OURS, ours("hibari"), "/v1/audio/speech", {"input": "Hi."}))
        servers = [mine, *peers(stack, "stream")]
        three = {n: measure(servers, ask(THREE, stream=True), n, 3 * direct["audio"]) for n in (1, 4)}
        forty = measure([mine], ask(FORTY, stream=True), 1, 2 * direct["audio"])[OURS]
        twenty = measure([mine], ask(TWENTY, stream=True), 1, direct["audio"])[OURS]
    report(direct, whole, three, forty, twenty)


def report(
    direct: dict[str, float],
    whole: dict[int, Figures],
    three: dict[int, Figures],
    forty: dict[str, float],
    twenty: dict[str, float],
) -> None:
    """Tables, goals, JSON."""
    rows = [
        (n, name, f["requests_per_second"], f["total_p50"], f["total_p99"], f["audio_per_cpu_second"])
        for n, found in whole.items()
        for name, f in found.items()
    ]
    header = ("clients", "server", "requests/s", "p50 ms", "p99 ms", "audio s per CPU s")
    table("whole answers of 20 words", header, rows)
    rows = [
        (n, name, f["first_p50"], f["first_p95"]) for n, found in three.items() for name, f in found.items()
    ]
    table("first byte of three sentences", ("clients", "server", "p50 ms", "p95 ms"), rows)
    print()
    factor = twenty["total_p50"] / 1000 / direct["audio"] / direct["real_time_factor"]
    first = forty["first_p50"] / 1000 / direct["forty_words"]
    goals = [
        goal("first audio of 40 words, of the package's whole time", first, 0.5, at_least=False),
        goal("real-time factor of one listener, of the package's", factor, 1.25, at_least=False),
    ]
    for clients in (8, 16):
        ratio = _ratio(whole[clients], "requests_per_second", max)
        goals.append(goal(f"throughput at {clients} clients, of the best peer", ratio, 1.2, at_least=True))
    for clients in (1, 4):
        ratio = _ratio(three[clients], "first_p50", min)
        goals.append(goal(f"first byte at {clients} clients, of the best peer", ratio, 0.5, at_least=False))
    save(
        "speech",
        {"package": direct, "whole": whole, "three": three, "forty": forty, "twenty": twenty, "goals": goals},
    )


def _ratio(found: Figures, key: str, best: Callable[[list[float]], float]) -> float:
    return found[OURS][key] / best([row[key] for name, row in found.items() if name != OURS])


if __name__ == "__main__":
    main()
