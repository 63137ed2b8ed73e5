"""The private folder of one server: ipc sockets and shared-memory files, and nothing else.

A `lock` file in it is held with `flock` while the server lives. The kernel gives the lock back
however the server ends, so that the next start can tell what was left behind from what is in use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
NAME = re.compile("[0-9a-f]{8}")
SOCKET_PATH_LIMIT = 107
"""Bytes of `sun_path` on Linux without the closing zero."""

SOCKET_NAME_ROOM = 16
"""What a socket's name inside the folder may take, with its slash."""


def in_shared_memory(path: Path) -> bool:
    """Whether files under `path` are memory: elsewhere a mapped file is written back to a disk."""
    return SHARED_MEMORY in path.resolve().parents


class RunDir:
    """One server's folder, made by `create` and held until `remove`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @staticmethod
    def create(root: Path | None = None) -> RunDir:
        """Make a folder of mode 0700 under `root`; None: under /dev/shm, else the temporary folder.

        Raises `PermissionError` when the root belongs to somebody else, `ValueError` when its path is
        too long for sockets.
        """
        root = _default_root() if root is None else root
        path = root / secrets.token_hex(4)
        if len(os.fsencode(path)) + SOCKET_NAME_ROOM > SOCKET_PATH_LIMIT:
            raise ValueError(f"{root} is too long a path for unix sockets")
        _make_private(root)
        with _alone_in(root):
            path.mkdir(mode=0o700)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        return RunDir(path, lock)

    @staticmethod
    def reap_stale(root: Path | None = None) -> list[Path]:
        """Remove the folders of servers that are gone and return them. None: under every default root."""
        roots = _default_roots() if root is None else [root]
        return [path for each in roots if _is_private(each) for path in _reap(each)]

    @property
    def in_shared_memory(self) -> bool:
        """Whether the folder lies in memory, so that arenas work in it."""
        return in_shared_memory(self.path)

    def remove(self) -> None:
        """Remove the folder with all that is in it; the second time nothing happens."""
        if self._lock is None:
            return
        remove_tree(self.path)
        os.close(self._lock)
        self._lock = None


def _default_roots() -> list[Path]:
    name = f"omni-async-{os.getuid()}"
    return [SHARED_MEMORY / name, Path(tempfile.gettempdir()) / name]


def _default_root() -> Path:
    shared, temporary = _default_roots()
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    return shared if usable else temporary


def _make_private(root: Path) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(root):
        raise PermissionError(f"{root} must be a folder of this user that nobody else may write to")


def _is_private(root: Path) -> bool:
    # In a folder that everybody may write to, somebody else may have made ours first.
    try:
        info = root.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022


@contextmanager
def _alone_in(root: Path) -> Generator[None]:
    """Keep creating and reaping apart: a folder whose lock is not yet taken looks abandoned."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _reap(root: Path) -> list[Path]:
    with _alone_in(root):
        stale = [path for path in root.iterdir() if not path.is_symlink() and _is_abandoned(path)]
        for path in stale:
            remove_tree(path)
    return stale


def _is_abandoned(path: Path) -> bool:
    if not NAME.fullmatch(path.name) or not path.is_dir():
        return False
    try:
        fd = os.open(path / "lock", os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def remove_tree(path: Path) -> None:
    """Remove a run folder, whoever else is about to."""
    # ZeroMQ and orphaned workers make and unlink files of theirs at the same moment: look again.
    while path.exists():
        try:
            shutil.rmtree(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
