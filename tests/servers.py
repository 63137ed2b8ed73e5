"""Servers as processes, for tests: started on a free port, waited for, and ended by process id."""

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


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Server:
    """A server process and its address."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.ws_url = f"ws://127.0.0.1:{port}"

    def wait_ready(self, path: str = "/health/ready", seconds: float = 90.0) -> None:
        """Wait until it answers 200."""
        poll_until(lambda: self._answers(path), seconds)

    def _answers(self, path: str) -> bool:
        assert self.process.poll() is None, f"the server ended with {self.process.returncode}"
        try:
            return httpx.get(self.url + path, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def workers(self) -> list[psutil.Process]:
        """Its child processes."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def open_files(self) -> int:
        """File descriptors of the server and its workers."""
        return sum(p.num_fds() for p in [psutil.Process(self.process.pid), *self.workers()])

    def stop(self, seconds: float = 20.0) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def poll_until(condition, seconds: float = 10.0) -> None:  # type: ignore[no-untyped-def]
    """Wait for `condition`, which no event announces; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@contextmanager
def command(*args: str, port: int, ready: str = "/health/ready") -> Iterator[Server]:
    """`python ARGS` as a server on `port`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *args], cwd=ROOT, env=environment)
    server = Server(process, port)
    try:
        server.wait_ready(ready)
        yield server
    finally:
        server.stop()


@contextmanager
def serve(*args: str) -> Iterator[Server]:
    """`omni-async serve ARGS` on a free port."""
    port = free_port()
    with command("-m", "omni_async", "serve", *args, "--port", str(port), port=port) as server:
        yield server
