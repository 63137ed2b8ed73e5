"""What holds for every test: it leaves nothing behind.

Compared are the moment before the test's own fixtures are set up and the moment after they are torn
down, so that servers shared by many tests do not count. What ends by itself gets `SETTLE_SECONDS`.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import time
from collections.abc import AsyncGenerator, Generator, Iterator
from pathlib import Path

import psutil
import pytest

from omni_async.stages.torchvision_operators import make_torchvision_importable

# Tests import transformers in many places, which imports it where it is installed.
make_torchvision_importable()

SETTLE_SECONDS = 3.0
BEFORE = pytest.StashKey["Holdings"]()


class Holdings:
    """What this process holds that outlives a test unless it is given back."""

    def __init__(self) -> None:
        self.children = {child.pid for child in _children()}
        self.run_dirs = set(_own_run_dirs())
        self.sockets = set(_sockets())

    def leaks_since(self, before: Holdings) -> list[str]:
        """One line for each thing that was not there before."""
        return [
            *(f"child process {_describe(pid)}" for pid in self.children - before.children),
            *(f"run folder {path}" for path in self.run_dirs - before.run_dirs),
            *(f"open {name}" for name in self.sockets - before.sockets),
        ]


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> None:
    """Remember what is held before the test; it is compared when all fixtures are torn down."""
    request.node.stash[BEFORE] = Holdings()
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("leaves_no_task_behind")


@pytest.fixture
async def leaves_no_task_behind() -> AsyncGenerator[None]:
    """Tasks of the test's loop end with the test: nobody is there to see them fail later."""
    before = asyncio.all_tasks()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
        assert time.monotonic() < deadline, f"tasks left running: {left}"
        await asyncio.sleep(0.01)


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """For tests that set up logging: the root logger is afterwards what it was before."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield
    before = item.stash.get(BEFORE, None)
    if before is not None and (leaks := _settled_leaks(before)):
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


def _settled_leaks(before: Holdings) -> list[str]:
    deadline = time.monotonic() + SETTLE_SECONDS
    while leaks := Holdings().leaks_since(before):
        if time.monotonic() > deadline:
            return leaks
        gc.collect()
        time.sleep(0.02)
    return []


def _children() -> list[psutil.Process]:
    """Direct children. The standard library's resource tracker is one for the whole process."""
    children = psutil.Process().children()
    return [child for child in children if "resource_tracker" not in _describe(child.pid)]


def _describe(pid: int) -> str:
    try:
        return f"{pid} ({' '.join(psutil.Process(pid).cmdline()[:8])})"
    except psutil.NoSuchProcess:
        return str(pid)


def _sockets() -> list[str]:
    """The open sockets by inode number."""
    names: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return [name for name in names if name.startswith("socket:")]


def _own_run_dirs() -> list[Path]:
    """Run folders, without those that a process outside of this one's family holds locked."""
    family = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    holders = _lock_holders()
    found = [*Path("/dev/shm").glob("omni-async-*/*"), *Path("/tmp").glob("omni-async-*/*")]
    return [path for path in found if holders.get(_file_id(path / "lock"), os.getpid()) in family]


def _file_id(path: Path) -> str:
    """The file as /proc/locks names it; "" when it is gone."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return ""
    return f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"


def _lock_holders() -> dict[str, int]:
    """The process that holds a file's `flock`, by file."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {line[5]: int(line[4]) for line in lines if line[1] == "FLOCK"}
