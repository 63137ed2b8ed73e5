"""A server as a process: its workers live, die and come back with it, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from tests.servers import ROOT, poll_until, serve


def run_dirs() -> set[Path]:
    """The private folders of the servers that run."""
    return set(Path(f"/dev/shm/omni-async-{os.getuid()}").glob("*"))


def echo(url: str, text: str = "hi", chunks: int = 1) -> httpx.Response:
    """One echo request."""
    return httpx.post(f"{url}/v1/echo", json={"text": text, "chunks": chunks}, timeout=30)


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all have ended."""
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)


def test_sigterm_ends_server_and_workers_and_leaves_nothing() -> None:
    before = run_dirs()
    with serve("echo") as server:
        assert echo(server.url).json() == {"text": "hi"}
        workers = server.workers()
        assert workers
        assert len(run_dirs() - before) == 1
        assert server.stop() == 0
        poll_until(lambda: gone(workers), 2)
    assert run_dirs() <= before


def test_kill_9_of_the_server_leaves_nothing_behind() -> None:
    before = run_dirs()
    with serve("echo", "--stage-0-num-replicas", "2") as server:
        workers = server.workers()
        assert len(workers) == 2
        server.process.kill()
        server.process.wait()
        poll_until(lambda: gone(workers), 2)
        poll_until(lambda: run_dirs() <= before, 2)


def test_a_killed_worker_comes_back_and_its_undelivered_requests_are_answered() -> None:
    with serve("echo") as server, ThreadPoolExecutor(8) as pool:
        (worker,) = server.workers()
        worker.suspend()
        answers = [pool.submit(echo, server.url, f"text {i}") for i in range(8)]
        poll_until(lambda: httpx.get(server.url + "/health/ready").json()["stages"][0]["running"] == 8)
        worker.kill()
        assert [a.result().json() for a in answers] == [{"text": f"text {i}"} for i in range(8)]
        (again,) = server.workers()
        assert again.pid != worker.pid


def test_a_hung_worker_is_replaced_and_readiness_tells() -> None:
    with serve("echo", "--stage-hang-timeout", "10") as server:
        (worker,) = server.workers()
        worker.suspend()
        poll_until(lambda: httpx.get(server.url + "/health/ready").status_code == 503, 20)
        server.wait_ready()
        assert echo(server.url).json() == {"text": "hi"}
        assert [p.pid for p in server.workers()] != [worker.pid]


def test_a_wrong_deploy_config_ends_with_a_sentence_and_not_a_traceback(tmp_path: Path) -> None:
    config = tmp_path / "deploy.yaml"
    config.write_text("name: x\nstages: [{stage_id: 0, name: s, kind: echo, max_num_seq: 3}]\n")
    done = subprocess.run(
        [sys.executable, "-m", "omni_async", "serve", "--deploy-config", str(config), "--port", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "max_num_seqs" in done.stderr
    assert "Traceback" not in done.stderr


def test_two_servers_do_not_get_in_each_others_way() -> None:
    with serve("echo") as one, serve("echo") as two:
        assert echo(one.url, "one").json() == {"text": "one"}
        assert echo(two.url, "two").json() == {"text": "two"}
        one.process.send_signal(signal.SIGTERM)
        one.process.wait(20)
        assert echo(two.url, "still").json() == {"text": "still"}
