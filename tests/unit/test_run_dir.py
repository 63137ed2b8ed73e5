"""The run folder: private, short, and gone after its server, however that ended."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from omni_async.transports import run_dir as run_dir_module
from omni_async.transports.run_dir import RunDir

ROOT = Path(__file__).parents[2]
HOLD = (
    "import sys, pathlib\n"
    "from omni_async.transports.run_dir import RunDir\n"
    "held = RunDir.create(pathlib.Path(sys.argv[1]))\n"
    "print(held.path, flush=True)\n"
    "sys.stdin.read()\n"
)


def hold(root: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a run folder under `root`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(root)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


def test_the_folder_is_private_and_in_shared_memory_where_there_is_any() -> None:
    run_dir = RunDir.create()
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    assert run_dir.path.parent.stat().st_mode & 0o777 == 0o700
    assert run_dir.in_shared_memory == run_dir.path.is_relative_to("/dev/shm")
    assert run_dir.in_shared_memory == Path("/dev/shm").is_dir()
    assert len(str(run_dir.path)) < 50
    run_dir.remove()


def test_without_shared_memory_it_lies_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir_module, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run_dir = RunDir.create()
    assert run_dir.path.parent == tmp_path / f"omni-async-{os.getuid()}"
    assert not run_dir.in_shared_memory
    run_dir.remove()


def test_remove_takes_everything_along_and_may_be_repeated(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path)
    (run_dir.path / "sub").mkdir()
    (run_dir.path / "sub" / "file").touch()
    run_dir.remove()
    run_dir.remove()
    assert list(tmp_path.iterdir()) == []


def test_remove_bears_that_a_worker_removed_the_folder_first(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path)
    shutil.rmtree(run_dir.path)
    run_dir.remove()


def test_the_folder_of_a_killed_server_is_reaped_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    killed, left_behind = hold(tmp_path)
    living, in_use = hold(tmp_path)
    own = RunDir.create(tmp_path)
    try:
        (left_behind / "w.arena").touch()
        end(killed)
        assert RunDir.reap_stale(tmp_path) == [left_behind]
        assert not left_behind.exists()
        assert in_use.exists()
        assert own.path.exists()
        assert RunDir.reap_stale(tmp_path) == []
    finally:
        end(living)
        own.remove()
    assert RunDir.reap_stale(tmp_path) == [in_use]


def test_a_child_that_outlives_the_server_does_not_hold_its_folder(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False):
        with (run_dir.path / "lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # What the kernel does to the server's descriptors when it is killed.
        held = run_dir._lock  # pyright: ignore[reportPrivateUsage]
        assert held is not None
        os.close(held)
        assert RunDir.reap_stale(tmp_path) == [run_dir.path]


def test_only_run_folders_are_reaped(tmp_path: Path) -> None:
    (tmp_path / "documents").mkdir()
    (tmp_path / "0123abcd.txt").touch()
    (tmp_path / "89abcdef").symlink_to(tmp_path / "documents")
    half_made = tmp_path / "0123abcd"
    half_made.mkdir()
    assert RunDir.reap_stale(tmp_path) == [half_made]
    assert RunDir.reap_stale(tmp_path / "none") == []


def test_servers_that_start_at_once_do_not_reap_each_other(tmp_path: Path) -> None:
    made: list[RunDir] = []

    def start() -> None:
        for _ in range(20):
            RunDir.reap_stale(tmp_path)
            made.append(RunDir.create(tmp_path))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 80
    for run_dir in made:
        assert run_dir.path.exists()
        run_dir.remove()


def test_a_root_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="nobody else may write"):
        RunDir.create(tmp_path)
    assert RunDir.reap_stale(tmp_path) == []
    tmp_path.chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        RunDir.create(tmp_path / "link")


def test_a_path_too_long_for_unix_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long"):
        RunDir.create(tmp_path / ("x" * 100))
