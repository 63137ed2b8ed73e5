"""What does stepping pictures together bring? Beside the stock pipeline behind a lock, and one at a time.

`python -m benchmarks.pictures`: a tiny random Qwen-Image of 64 pixels, one thread a process; rounds are
interleaved and medians count. Sizes and step counts are mixed, as are those of real callers.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import httpx

from benchmarks.load import load
from benchmarks.report import goal, save, table
from benchmarks.servers import Server, ours, serving
from tests.stepping import ask, load_executor, run
from tests.tiny.folders import stock_pipeline, tiny_folder

CLIENTS = (1, 4, 8)
ROUNDS, SECONDS = 3, 5.0
ROUTE = "/v1/images/generations"
FAMILY = "qwen_image"


def body(size: str, steps: int, seed: int) -> dict[str, object]:
    """A request; the words `negative_prompt` make the stock pipeline guide as ours does."""
    fields = {"prompt": "a cat", "negative_prompt": " ", "true_cfg_scale": 4.0, "seed": seed}
    return {**fields, "size": size, "num_inference_steps": steps}


SAME = body("64x64", 4, 0)
MIXED = [
    body(size, steps, seed)
    for seed, (size, steps) in enumerate(
        [("64x64", 6), ("64x80", 8), ("80x64", 10), ("64x64", 12), ("64x96", 6), ("64x64", 8), ("64x80", 10)]
    )
]


def measure(servers: list[Server], what: Any, clients: int) -> dict[str, dict[str, float]]:
    """Medians over rounds, and pictures per second of CPU time."""
    seen: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    for _ in range(ROUNDS):
        for server in servers:
            cpu = server.cpu_seconds()
            found = load(server.url(ROUTE), what, clients, SECONDS)
            assert not found["errors"], (server.name, found)
            found["per_cpu_second"] = found["requests"] / (server.cpu_seconds() - cpu)
            seen[server.name].append(found)
    return {name: {key: median(row[key] for row in rows) for key in rows[0]} for name, rows in seen.items()}


async def short_behind_long(server: Server) -> float:
    """Seconds of a request of 4 steps that comes while one of 50 runs."""
    async with httpx.AsyncClient(timeout=120) as client:
        long = asyncio.create_task(client.post(server.url(ROUTE), json=body("64x64", 50, 0)))
        await asyncio.sleep(0.1)
        began = time.perf_counter()
        (await client.post(server.url(ROUTE), json=body("64x96", 4, 1))).raise_for_status()
        seconds = time.perf_counter() - began
        (await long).raise_for_status()
    return seconds


def direct() -> tuple[float, float]:
    """Pictures per second of the pipeline without a server, and the CPU time of our step loop in its own."""
    pipe, executor = stock_pipeline(FAMILY), load_executor(tiny_folder(FAMILY), FAMILY, prompt_cache_size=0)
    fields = {"negative_prompt": " ", "true_cfg_scale": 4.0, "num_inference_steps": 20}
    wanted = ask("a cat", steps=20, negative_prompt=" ", true_cfg_scale=4.0)
    rates, ratios = [], []
    for _ in range(15):
        began = time.perf_counter()
        pipe("a cat", width=64, height=64, **{**fields, "num_inference_steps": 4})
        rates.append(1 / (time.perf_counter() - began))
        began = time.process_time()
        pipe("a cat", width=64, height=64, **fields)
        stock = time.process_time() - began
        began = time.process_time()
        run(executor, [wanted])
        ratios.append((time.process_time() - began) / stock)
    return median(rates), median(ratios)


def main() -> None:
    """Mixed requests, equal requests, a short one behind a long one, and the cost of the loop."""
    import torch

    torch.set_num_threads(1)
    folder = str(tiny_folder(FAMILY))
    commands = {
        "omni_async": ours(folder),
        "one at a time": ours(folder, "--stage-0-max-num-seqs", "1"),
        "stock, locked": ("-m", "benchmarks.peers.pipeline_peer", folder, "{port}"),
    }
    bare, overhead = direct()
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(name, c, ROUTE, SAME)) for name, c in commands.items()]
        mixed = {clients: measure(servers, MIXED, clients) for clients in CLIENTS}
        equal = {clients: measure(servers[:1], SAME, clients) for clients in CLIENTS}
        waits = {s.name: median(asyncio.run(short_behind_long(s)) for _ in range(5)) for s in servers}
    rows = [
        (clients, name, row["requests_per_second"], row["per_cpu_second"], row["total_p50"], row["total_p95"])
        for clients, found in mixed.items()
        for name, row in found.items()
    ]
    table("mixed sizes and steps", ("clients", "server", "pictures/s", "per CPU s", "p50 ms", "p95 ms"), rows)
    rates = {clients: found["omni_async"]["requests_per_second"] for clients, found in equal.items()}
    rows = [(clients, rate, rate / bare) for clients, rate in rates.items()]
    table(f"64 × 64, 4 steps; diffusers alone {bare:.3g}/s", ("clients", "pictures/s", "ratio"), rows)
    rows = [(name, 1000 * seconds) for name, seconds in waits.items()]
    table("4 steps behind 50", ("server", "ms"), rows)
    print()
    mine, theirs = mixed[8]["omni_async"], mixed[8]["stock, locked"]
    speedup = mine["requests_per_second"] / theirs["requests_per_second"]
    goals = [
        goal("pictures/s at 8 clients, of stock behind a lock", speedup, 1.5, at_least=True),
        goal("p95 at 8 clients", mine["total_p95"] / theirs["total_p95"], 0.6, at_least=False),
        goal("4 steps behind 50", waits["omni_async"] / waits["stock, locked"], 0.3, at_least=False),
        *(
            goal(
                f"pictures/s of diffusers alone at {clients} clients",
                rates[clients] / bare,
                bound,
                at_least=True,
            )
            for clients, bound in zip(CLIENTS, (0.95, 1.5, 1.8), strict=True)
        ),
        goal("CPU time of the step loop, of the stock loop", overhead, 1.03, at_least=False),
    ]
    save("pictures", {"mixed": mixed, "equal": equal, "waits": waits, "direct": bare, "goals": goals})


if __name__ == "__main__":
    main()
