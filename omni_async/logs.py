"""Logs that carry the request's id, as text or JSON lines on standard error.

The server and its workers call `setup`; a program that embeds the engine sets up its own logging, and
its workers follow the level of the `omni_async` logger.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
_NUMBERS = {name: logging.getLevelNamesMapping()[name.upper()] for name in LEVELS}

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The public id of the request that the current task works for; "" outside of requests."""


@contextmanager
def of_request(public_id: str) -> Generator[None]:
    """What is logged inside, by this task and by tasks that it starts, carries `public_id`."""
    token = request_id.set(public_id)
    try:
        yield
    finally:
        request_id.reset(token)


class TextFormatter(logging.Formatter):
    """One line: time, level, logger, request, message; a traceback behind it where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(request)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        found = _request_of(record)
        record.request = f" [{found}]" if found else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, logger, message, request_id, exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The object."""
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := _request_of(record):
            entry["request_id"] = found
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _request_of(record: logging.LogRecord) -> str:
    return getattr(record, "request_id", "") or request_id.get()


class _Handler(logging.StreamHandler[Any]):
    """The one that `setup` put there."""

    def __init__(self, log_format: str) -> None:
        super().__init__(sys.stderr)
        self.log_format = log_format
        self.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())


def setup(log_format: str = "text", level: str = "info") -> None:
    """Send the logs of this process from `level` on to standard error, in a format of `FORMATS`.

    A second call replaces the first; handlers of others stay. Raises `ValueError` for unknown names.
    """
    if log_format not in FORMATS or level not in LEVELS:
        raise ValueError(f"no log format {log_format!r} or no level {level!r}")
    root = logging.getLogger()
    for handler in _own_handlers():
        root.removeHandler(handler)
    root.addHandler(_Handler(log_format))
    root.setLevel(level.upper())


def current_format() -> str:
    """The format that `setup` chose; "text" before it."""
    own = _own_handlers()
    return own[0].log_format if own else "text"


def current_level() -> str:
    """The level from which this package's logs are shown, as a name of `LEVELS`."""
    effective = logging.getLogger("omni_async").getEffectiveLevel()
    return next((name for name, number in _NUMBERS.items() if effective <= number), LEVELS[-1])


def _own_handlers() -> list[_Handler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, _Handler)]
