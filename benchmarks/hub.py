"""What does the engine cost? Echo requests and chunks over HTTP, beside servers that do the same.

`python -m benchmarks.hub`: rounds are interleaved, so that all see the same machine; medians count. A
bare starlette handler does its work in the server's own process, ours crosses to a stage and back.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.load import load
from benchmarks.report import goal, save, table
from benchmarks.servers import Server, litserve, mosec, ours, serving, starlette

CLIENTS = (1, 8, 16)
ROUNDS, SECONDS = 5, 2.0
BODY: dict[str, object] = {"text": "hello"}
CHUNKS = 2000
STREAM = {"text": "x" * 64, "chunks": CHUNKS, "stream": True}
ROUTES = {"omni_async": "/v1/echo", "starlette": "/echo", "mosec": "/inference", "litserve": "/predict"}


def measure(servers: list[Server], body: Any, clients: int) -> dict[str, dict[str, float]]:
    """Medians over rounds of what each server does, and its CPU time a request in microseconds."""
    seen: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    for _ in range(ROUNDS):
        for server in servers:
            cpu = server.cpu_seconds()
            found = load(server.url(ROUTES[server.name]), body, clients, SECONDS)
            assert not found["errors"], (server.name, found)
            found["cpu_us"] = (server.cpu_seconds() - cpu) / found["requests"] * 1e6
            seen[server.name].append(found)
    return {name: {key: median(row[key] for row in rows) for key in rows[0]} for name, rows in seen.items()}


def main() -> None:
    """Requests, then chunks."""
    commands = {
        "omni_async": ours("echo"),
        "starlette": starlette("echo"),
        "mosec": mosec("echo", 1),
        "litserve": litserve("echo", 1),
    }
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(name, command, ROUTES[name], BODY))
            for name, command in commands.items()
        ]
        requests = {clients: measure(servers, BODY, clients) for clients in CLIENTS}
        chunks = {clients: measure(servers[:2], STREAM, clients) for clients in (1, 8)}
    rows, goals = [], []
    for clients, found in requests.items():
        base = found["starlette"]["requests_per_second"]
        for name, row in found.items():
            rate = row["requests_per_second"]
            rows.append((clients, name, rate, rate / base, row["total_p50"], row["total_p99"], row["cpu_us"]))
        ratio = found["omni_async"]["requests_per_second"] / base
        goals.append((f"requests/s of starlette's at {clients} clients", ratio, 0.5))
    table("echo", ("clients", "server", "requests/s", "ratio", "p50 ms", "p99 ms", "CPU µs"), rows)
    rows = [
        (clients, name, row["requests_per_second"] * CHUNKS, row["cpu_us"] / CHUNKS)
        for clients, found in chunks.items()
        for name, row in found.items()
    ]
    table("streamed echo", ("clients", "server", "chunks/s", "CPU µs a chunk"), rows)
    print()
    met = [goal(text, ratio, bound, at_least=True) for text, ratio, bound in goals]
    save("hub", {"requests": requests, "chunks": chunks, "goals": met})


if __name__ == "__main__":
    main()
