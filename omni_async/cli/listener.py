"""The listening socket of `serve`: taken before anything is loaded, so that a port in use costs no start-up.

It listens at once: a client that connects while the models load waits for its answer.
"""

from __future__ import annotations

import errno
import socket
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from omni_async.errors import ConfigError

BACKLOG = 2048
"""Connections that wait to be accepted; the kernel caps it at net.core.somaxconn (4096 by default)."""


class Listener(NamedTuple):
    """A socket that listens; `url` for people, and the words that come before a URL in a curl command."""

    sock: socket.socket
    url: str
    curl: str


@contextmanager
def listen(host: str, port: int, uds: str | None) -> Generator[Listener]:
    """Listen on `host`:`port` (0: any free port), or on the unix socket `uds`, which is removed at the end.

    Raises `ConfigError` when that is not possible.
    """
    try:
        listener = _on_path(Path(uds)) if uds is not None else _on_port(host, port)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such port"
        raise ConfigError(f"cannot listen on {uds or f'{host}:{port}'}: {reason}.") from None
    with listener.sock:
        yield listener
    if uds is not None:
        Path(uds).unlink(missing_ok=True)


def _on_port(host: str, port: int) -> Listener:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    shown = f"[{host}]" if ":" in host else host
    return Listener(sock, f"http://{shown}:{sock.getsockname()[1]}", "curl ")


def _on_path(path: Path) -> Listener:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_abandoned(path)
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return Listener(sock, "http://localhost", f"curl --unix-socket {path} ")


def _remove_abandoned(path: Path) -> None:
    """A killed server leaves its socket file, to which nobody listens; other files are nobody's to remove."""
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
