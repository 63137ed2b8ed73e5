"""How fast does a tensor get from one process to another, and what does it cost?

`python benchmarks/transport.py`: an array goes to a child process, which looks at both ends of it and
answers with a small message. Every transport has a child of its own; rounds are interleaved, so that
they see the same machine, and the median of all operations counts. Ours runs on a uvloop loop and
hands the child a view; the peers hand it a copy of its own. "queue" blocks its thread, which is its
best case; "queue, asyncio" is how an event loop has to use it. CPU is both processes together.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import uvloop
import zmq
import zmq.asyncio

from omni_async.messages import Consumed, Input, Stop
from omni_async.transports.run_dir import RunDir
from omni_async.transports.shm import Arena, ArenaReader, pack, unpack
from omni_async.transports.zeromq import AsyncZmqChannel, SyncZmqChannel

SIZES = {"1K": 1 << 10, "16K": 1 << 14, "256K": 1 << 18, "1M": 1 << 20, "4M": 1 << 22, "16M": 1 << 24}
ROUNDS, WARM_UP = 25, 5
RESULTS = Path(__file__).parent / "results" / "transport.json"
spawn = mp.get_context("spawn")


class Transport(Protocol):
    """Sends an array and waits for the answer: the child's CPU time so far, in ns."""

    async def exchange(self, array: Any) -> int: ...

    def close(self) -> None: ...


def answer(array: Any) -> int:
    """What the child does with an array."""
    assert array[0] == array[-1]
    return time.process_time_ns()


class Memcpy:
    """No process at all: the copy that any transport makes at least once."""

    def __init__(self, folder: Path) -> None:
        self.target = np.zeros(max(SIZES.values()), np.uint8)

    async def exchange(self, array: Any) -> int:
        self.target[: array.size] = array
        return 0

    def close(self) -> None:
        pass


class Ours:
    """The engine's end of a channel, and an arena."""

    def __init__(self, folder: Path) -> None:
        self.channel = AsyncZmqChannel(f"ipc://{folder}/ours")
        self.channel.start(self.on_message)
        self.arena = Arena(folder, "bench", 64 << 20)
        self.child = child(serve_ours, self.channel.address, folder)
        self.sequence = 0
        self.reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_message(self, message: Any, frames: Any) -> None:
        self.arena.release(1, self.sequence)
        self.reply.set_result(message.upto)

    async def exchange(self, array: Any) -> int:
        self.reply = asyncio.get_running_loop().create_future()
        tensors, frames = pack({"x": array}, arena=self.arena, request=1, seq=self.sequence)
        self.channel.send(Input(request=1, source="a", seq=self.sequence, tensors=tensors), frames)
        self.sequence += 1
        return await self.reply

    def close(self) -> None:
        self.channel.send(Stop())
        self.child.join()
        self.channel.close()
        self.arena.close()


def serve_ours(address: str, folder: Path) -> None:
    channel, reader = SyncZmqChannel(address), ArenaReader(folder)
    while (item := channel.recv(None)) is not None and isinstance(item[0], Input):
        array = unpack(item[0].tensors, item[1], reader)["x"]
        channel.send(Consumed(request=1, source="a", upto=answer(array)))
    channel.close()


class Queue:
    """`multiprocessing.Queue` there and back."""

    def __init__(self, folder: Path) -> None:
        self.there, self.back = spawn.Queue(), spawn.Queue()
        self.child = child(serve_queue, self.there, self.back)

    async def exchange(self, array: Any) -> int:
        self.there.put(array)
        return self.back.get()

    def close(self) -> None:
        self.there.put(None)
        self.child.join()


class AsyncQueue(Queue):
    """The same from an event loop, which must not block: the wait goes to a thread."""

    async def exchange(self, array: Any) -> int:
        self.there.put(array)
        return await asyncio.to_thread(self.back.get)


def serve_queue(there: Any, back: Any) -> None:
    while (array := there.get()) is not None:
        back.put(answer(array))


class Pickled:
    """A plain pyzmq socket and pickle, blocking."""

    context: Any = zmq.Context

    def __init__(self, folder: Path) -> None:
        address = f"ipc://{folder}/{type(self).__name__}"
        self.opened = self.context()
        self.socket = self.opened.socket(zmq.PAIR)
        self.socket.bind(address)
        self.child = child(serve_pickled, address)

    async def exchange(self, array: Any) -> int:
        self.socket.send(pickle.dumps(array, pickle.HIGHEST_PROTOCOL))
        return pickle.loads(self.socket.recv())

    def close(self) -> None:
        self.socket.send(pickle.dumps(None))
        self.child.join()
        self.opened.destroy(0)


class AsyncPickled(Pickled):
    """The same through `zmq.asyncio`."""

    context = zmq.asyncio.Context

    async def exchange(self, array: Any) -> int:
        await self.socket.send(pickle.dumps(array, pickle.HIGHEST_PROTOCOL))
        return pickle.loads(await self.socket.recv())


def serve_pickled(address: str) -> None:
    context: Any = zmq.Context()
    socket: Any = context.socket(zmq.PAIR)
    socket.connect(address)
    while (array := pickle.loads(socket.recv())) is not None:
        socket.send(pickle.dumps(answer(array)))
    context.destroy()


def child(target: Callable[..., None], *args: Any) -> Any:
    process = spawn.Process(target=target, args=args)
    process.start()
    return process


async def measure(transport: Transport, array: Any, count: int) -> tuple[list[float], float]:
    """Wall seconds of each of `count` exchanges, and mean CPU seconds of one."""
    child_began, began = await transport.exchange(array), time.process_time_ns()
    walls: list[float] = []
    child_ended = child_began
    for _ in range(count):
        start = time.perf_counter()
        child_ended = await transport.exchange(array)
        walls.append(time.perf_counter() - start)
    cpu = time.process_time_ns() - began + child_ended - child_began
    return walls, cpu / count / 1e9


async def compare(transports: dict[str, Transport], size: int) -> dict[str, dict[str, float]]:
    """Median wall and CPU microseconds of each transport at one size."""
    array = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    array[-1] = array[0]
    count = max(3, min(60, (16 << 20) // size))
    walls: dict[str, list[float]] = {name: [] for name in transports}
    cpus: dict[str, list[float]] = {name: [] for name in transports}
    for round_number in range(ROUNDS + 1):
        for name, transport in transports.items():
            wall, cpu = await measure(transport, array, count if round_number else WARM_UP)
            if round_number:
                walls[name] += wall
                cpus[name].append(cpu)
    return {
        name: {"wall_us": median(walls[name]) * 1e6, "cpu_us": median(cpus[name]) * 1e6}
        for name in transports
    }


async def run() -> dict[str, dict[str, dict[str, float]]]:
    """All sizes."""
    makers = {
        "memcpy": Memcpy,
        "ours": Ours,
        "queue": Queue,
        "queue, asyncio": AsyncQueue,
        "zmq": Pickled,
        "zmq.asyncio": AsyncPickled,
    }
    folder = RunDir.create()
    transports: dict[str, Transport] = {name: make(folder.path) for name, make in makers.items()}
    try:
        return {label: await compare(transports, size) for label, size in SIZES.items()}
    finally:
        for transport in transports.values():
            transport.close()
        folder.remove()


def goals(results: dict[str, dict[str, dict[str, float]]]) -> dict[str, tuple[float, str, float]]:
    """Each goal's name → ratio of wall times, relation, wanted."""
    big, small = ({k: v["wall_us"] for k, v in results[size].items()} for size in ("16M", "1K"))
    return {
        "16M, bandwidth / memcpy": (big["memcpy"] / big["ours"], ">=", 0.5),
        "16M, bandwidth / queue": (big["queue"] / big["ours"], ">=", 5.0),
        "1K, round trip / queue, asyncio": (small["ours"] / small["queue, asyncio"], "<=", 0.8),
    }


def report(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print the table and the goals."""
    names = list(results["1K"])
    print(f"median us wall (CPU), load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(f"{'':6}" + "".join(f"{name:>20}" for name in names) + f"{'ours GB/s':>11}{'queue/ours':>11}")
    for label, row in results.items():
        cells = "".join(f"{cell['wall_us']:11.0f} ({cell['cpu_us']:6.0f})" for cell in row.values())
        ours = row["ours"]["wall_us"]
        print(f"{label:6}{cells}{SIZES[label] / ours / 1e3:11.2f}{row['queue']['wall_us'] / ours:11.1f}")
    for name, (ratio, relation, wanted) in goals(results).items():
        met = ratio >= wanted if relation == ">=" else ratio <= wanted
        print(f"{name}: {ratio:.2f} (goal {relation} {wanted}) {'met' if met else 'MISSED'}")


def main() -> None:
    results = uvloop.run(run())
    report(results)
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "time": time.strftime("%F %T")}
    summary = {"machine": machine, "results": results, "goals": goals(results)}
    RESULTS.write_text(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
