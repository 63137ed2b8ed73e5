"""Servers under measurement: ours and the peers, as processes on free ports, and their CPU time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
PEER = "benchmarks.peers"


class Server:
    """A process tree that answers on a port."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int) -> None:
        self.name = name
        self.process = process
        self.port = port

    def url(self, path: str) -> str:
        """Of a route."""
        return f"http://127.0.0.1:{self.port}{path}"

    def tree(self) -> list[psutil.Process]:
        """The server's process first, then those it started."""
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Used so far by all of them."""
        times = [process.cpu_times() for process in self.tree()]
        return sum(t.user + t.system for t in times)


def ours(*args: str) -> tuple[str, ...]:
    """The command of `omni-async serve`."""
    return ("-m", "omni_async", "serve", *args, "--log-level", "warning", "--port", "{port}")


def starlette(kind: str) -> tuple[str, ...]:
    """A bare starlette handler under uvicorn."""
    return ("-m", f"{PEER}.starlette_peer", kind, "{port}")


def mosec(kind: str, workers: int) -> tuple[str, ...]:
    """mosec with so many worker processes."""
    return ("-m", f"{PEER}.mosec_peer", kind, str(workers), "{port}")


def litserve(kind: str, workers: int) -> tuple[str, ...]:
    """LitServe with so many worker processes."""
    return ("-m", f"{PEER}.litserve_peer", kind, str(workers), "{port}")


@contextmanager
def serving(name: str, command: tuple[str, ...], probe: str, body: dict[str, object]) -> Iterator[Server]:
    """Start `python COMMAND`, wait until `probe` answers `body` with 200, and end it by process id."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    args = [sys.executable, *(word.replace("{port}", str(port)) for word in command)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        args,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    server = Server(name, process, port)
    try:
        _wait(server, probe, body)
        yield server
    finally:
        processes = server.tree() if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(processes, timeout=5)
        for left in alive:
            left.kill()
        process.wait()


def _wait(server: Server, probe: str, body: dict[str, object]) -> None:
    deadline = time.monotonic() + 90
    while True:
        try:
            if httpx.post(server.url(probe), json=body, timeout=30).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{server.name} does not answer")
        time.sleep(0.05)
