"""`omni-async serve` and `run` as commands: sockets, the first and the second signal, what is printed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.pictor_things import NAMES, nearest
from tests.servers import ROOT, free_port, poll_until, serve

SECONDS = 60.0


@contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """`omni-async serve ARGV`, killed at the end if it still runs."""
    command = [sys.executable, "-m", "omni_async", "serve", *argv]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def greeting(process: subprocess.Popen[str]) -> str:
    """The line that is printed when the server is ready."""
    assert process.stdout is not None
    return process.stdout.readline()


def slow_echo(url: str, chunks: int) -> tuple[threading.Thread, list[int]]:
    """An echo request that takes a while, and the list in which its status will stand (0: no answer)."""
    statuses: list[int] = []

    def ask() -> None:
        body = {"text": "x", "chunks": chunks}
        try:
            statuses.append(httpx.post(f"{url}/v1/echo", json=body, timeout=SECONDS).status_code)
        except httpx.TransportError:
            statuses.append(0)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, statuses


def running(url: str) -> int:
    """Requests that hold a slot."""
    return httpx.get(f"{url}/health/ready").json()["stages"][0]["running"]


def test_the_greeting_is_one_line_whose_command_works() -> None:
    with started("echo", "--port", "0") as process:
        line = greeting(process)
        command = line.partition("try: ")[2]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == {"text": "Hello!"}
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=SECONDS)
    assert (rest, process.returncode) == ("", 0)


def test_a_unix_socket_is_served_removed_and_taken_over_from_a_killed_server(tmp_path: Path) -> None:
    path = tmp_path / "omni.sock"
    for end in (signal.SIGKILL, signal.SIGTERM):
        with started("echo", "--uds", str(path)) as process:
            assert f"curl --unix-socket {path} " in greeting(process)
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
                answer = client.post("http://localhost/v1/echo", json={"text": "hi"})
            assert answer.json() == {"text": "hi"}
            process.send_signal(end)
            process.wait(SECONDS)
        assert path.exists() == (end == signal.SIGKILL)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with started("echo", "--uds", str(path)) as process:
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert f"cannot listen on {path}: Address already in use" in said
    assert path.read_text() == "data"


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started("echo", "--port", str(port)) as process:
            out, said = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (2, "")
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in said
    assert "Traceback" not in said
    assert "worker" not in said


def test_a_caller_who_comes_while_the_models_load_waits_for_the_answer() -> None:
    port = free_port()
    with started("echo", "--port", str(port)) as process:
        transport = httpx.HTTPTransport(retries=0)

        def accepted() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        poll_until(accepted, SECONDS)
        with httpx.Client(transport=transport, timeout=SECONDS) as client:
            assert client.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200
        process.terminate()
        assert process.wait(SECONDS) == 0


def test_a_signal_while_the_models_load_ends_the_start() -> None:
    with started("hibari", "--port", "0") as process:
        assert process.stderr is not None
        poll_until(
            lambda: Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text() != "", SECONDS
        )
        process.terminate()
        out, said = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in said


def test_the_first_signal_lets_requests_end_and_refuses_new_ones() -> None:
    with serve("echo", "--stage-0-max-num-seqs", "1") as server:
        thread, statuses = slow_echo(server.url, chunks=30_000)
        poll_until(lambda: running(server.url) == 1)
        with httpx.Client() as client:
            assert client.get(f"{server.url}/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            poll_until(lambda: client.get(f"{server.url}/health/ready").status_code == 503)
            refused = client.post(f"{server.url}/v1/echo", json={"text": "new"})
        assert refused.status_code in (429, 503)
        assert not statuses, "the request had ended before the new one was refused"
        assert server.process.wait(SECONDS) == 0
        thread.join()
    assert statuses == [200]


@pytest.mark.parametrize("how", ["second signal", "drain_timeout"])
def test_requests_that_do_not_end_do_not_hold_the_server(how: str) -> None:
    timeout = "60" if how == "second signal" else "0.5"
    with serve("echo", "--drain-timeout", timeout) as server:
        thread, statuses = slow_echo(server.url, chunks=100_000)
        poll_until(lambda: running(server.url) == 1)
        server.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            poll_until(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        thread.join()
    assert statuses != [200]


def test_an_api_key_is_asked_for() -> None:
    port = free_port()
    with started("echo", "--port", str(port), "--api-key", "one", "--api-key", "two") as process:
        greeting(process)
        statuses = [
            httpx.post(f"http://127.0.0.1:{port}/v1/echo", json={"text": "hi"}, headers=headers).status_code
            for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "Bearer two"})
        ]
        process.terminate()
        assert process.wait(SECONDS) == 0
    assert statuses == [401, 401, 200]


def test_json_logs_are_json_in_the_server_and_in_its_workers() -> None:
    with started("echo", "--port", "0", "--log-format", "json", "--log-level", "debug") as process:
        greeting(process)
        process.terminate()
        _, said = process.communicate(timeout=SECONDS)
    entries = [json.loads(line) for line in said.splitlines()]
    assert any(entry["logger"] == "omni_async.supervisor" for entry in entries)


def test_run_answers_one_request_into_a_file_whose_ending_is_the_format(tmp_path: Path) -> None:
    output = tmp_path / "hello.wav"
    command = [sys.executable, "-m", "omni_async", "run", "--text", "Hello you.", "--output", str(output)]
    done = subprocess.run(
        [*command, "--voice", "heart", "--sample-rate", "16000", "--speed", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with wave.open(str(output)) as file:
        assert file.getframerate() == 16000
        assert 0.2 < file.getnframes() / 16000 < 1.5
    assert list(tmp_path.iterdir()) == [output]


def test_run_draws_a_picture_into_a_file(tmp_path: Path) -> None:
    output = tmp_path / "apple.webp"
    command = [sys.executable, "-m", "omni_async", "run", "--prompt", "red apple", "--output", str(output)]
    done = subprocess.run(
        [*command, "--size", "256x256", "--seed", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "256x256, seed 3" in done.stdout
    assert NAMES[nearest([np.asarray(Image.open(output))])[0]] == "red apple"


def test_run_refuses_an_unknown_voice_before_it_loads_a_model(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "omni_async",
        "run",
        "--text",
        "Hi.",
        "--output",
        str(tmp_path / "x.wav"),
    ]
    done = subprocess.run(
        [*command, "--voice", "nobody"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Unknown voice 'nobody'" in done.stderr
    assert "worker" not in done.stderr
