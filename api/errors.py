"""The one place where an error becomes an HTTP or a WebSocket answer."""

from __future__ import annotations

import math
import re

import msgspec
from starlette.exceptions import HTTPException

from omni_async.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    NotFound,
    OmniError,
    Overloaded,
    StageFailed,
)


class Unauthorized(InvalidRequest):
    """No API key, or one that is not known."""


class Forbidden(InvalidRequest):
    """What nobody may do, whatever the key."""


class TooLarge(InvalidRequest):
    """The body, upload or message is larger than the server takes."""


class WrongContentType(InvalidRequest):
    """The body is not of the media type that the route reads."""


class TimedOut(InvalidRequest):
    """The client of a session was silent for too long."""


class ClientGone(Exception):
    """The client has disconnected, so there is nobody to answer."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong. `param` names the field at fault."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    request_id: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class _Rule(msgspec.Struct, frozen=True):
    """How a class of errors is answered: HTTP status, `type`, default `code`, WebSocket close code."""

    status: int
    type: str
    code: str | None
    close: int


_INVALID = "invalid_request_error"
_RULES: dict[type[Exception], _Rule] = {
    Unauthorized: _Rule(401, "authentication_error", "invalid_api_key", 1008),
    Forbidden: _Rule(403, _INVALID, "forbidden", 1008),
    TooLarge: _Rule(413, _INVALID, "too_large", 1009),
    WrongContentType: _Rule(415, _INVALID, "wrong_content_type", 1003),
    TimedOut: _Rule(408, _INVALID, "timeout", 1008),
    NotFound: _Rule(404, _INVALID, "not_found", 1008),
    InvalidRequest: _Rule(400, _INVALID, "invalid_request", 1008),
    Overloaded: _Rule(503, "overloaded_error", "overloaded", 1013),
    DeadlineExceeded: _Rule(504, "timeout_error", "deadline_exceeded", 1011),
    EngineDead: _Rule(503, "server_error", "engine_dead", 1011),
    StageFailed: _Rule(500, "server_error", "stage_failed", 1011),
    Exception: _Rule(500, "server_error", "internal_error", 1011),
}
_HTTP_MESSAGES = {404: "There is no such route.", 405: "This route does not take this method."}
_JSON_PATH = re.compile(r" - at `(\$[A-Za-z0-9_.\[\]]*)`$")
_FIELD_FAULT = re.compile(r"^Object (?:contains unknown|missing required) field `(.*)`$", re.DOTALL)


def rule_of(error: Exception) -> _Rule:
    """The rule of the nearest class of `error`."""
    return next(_RULES[cls] for cls in type(error).__mro__ if cls in _RULES)


def http_status(error: Exception) -> int:
    """The status of an HTTP answer to `error`."""
    return error.status_code if isinstance(error, HTTPException) else rule_of(error).status


def close_code(error: Exception) -> int:
    """The code with which a WebSocket is closed because of `error`."""
    return rule_of(error).close


def error_detail(error: Exception, request_id: str | None) -> ErrorDetail:
    """What the caller is told; nothing of an error that is not an `OmniError`."""
    if isinstance(error, HTTPException):
        return _http_detail(error, request_id)
    rule = rule_of(error)
    if not isinstance(error, OmniError):
        message = "The server failed to answer this request; its log has the reason under the request id."
        return ErrorDetail(message=message, type=rule.type, code=rule.code, request_id=request_id)
    return ErrorDetail(
        message=error.message,
        type=rule.type,
        param=error.param,
        code=error.code or rule.code,
        request_id=request_id,
    )


def _http_detail(error: HTTPException, request_id: str | None) -> ErrorDetail:
    code = {404: "unknown_route", 405: "method_not_allowed"}.get(error.status_code)
    message = _HTTP_MESSAGES.get(error.status_code, error.detail)
    return ErrorDetail(message=message, type=_INVALID, code=code, request_id=request_id)


def error_headers(error: Exception) -> list[tuple[bytes, bytes]]:
    """Headers that go with the status: `Retry-After`, `WWW-Authenticate`, `Allow`."""
    if isinstance(error, HTTPException):
        return [(k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items()]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, Overloaded | EngineDead):
        return [(b"retry-after", str(max(1, math.ceil(error.retry_after or 1.0))).encode())]
    return []


def invalid_json(error: msgspec.DecodeError) -> InvalidRequest:
    """The caller's error that msgspec reports, with `param` as the path of the field at fault."""
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json")
    message = str(error)
    path = ""
    if found := _JSON_PATH.search(message):
        message, path = message[: found.start()], found.group(1).removeprefix("$").lstrip(".")
    if found := _FIELD_FAULT.match(message):
        path = f"{path}.{found.group(1)}".lstrip(".")
    code = "unknown_field" if "unknown field" in message else "invalid_value"
    return InvalidRequest(f"{message}." if not path else f"{path}: {message}.", param=path or None, code=code)
