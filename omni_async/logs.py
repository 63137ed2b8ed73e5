"""Structured logs that carry the request's id, as text or JSON lines on standard error."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from typing import Any

request_id: ContextVar[str] = ContextVar("request_id", default="")

FORMATS = ("text", "json")
_current = {"format": "text", "level": "info"}


class TextFormatter(logging.Formatter):
    """One line: time, level, logger, request, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(request)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, with a traceback behind it where there is one."""
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
        return json.dumps(entry)


def _request_of(record: logging.LogRecord) -> str:
    return getattr(record, "request_id", "") or request_id.get()


def setup(log_format: str = "text", level: str = "info") -> None:
    """Send all logs of this process to standard error in `log_format` ("text" or "json")."""
    _current.update(format=log_format, level=level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)


def current_format() -> str:
    """The format that `setup` chose, for workers to share."""
    return _current["format"]


def current_level() -> str:
    """The level that `setup` chose."""
    return _current["level"]
