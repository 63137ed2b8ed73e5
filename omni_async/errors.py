"""The one error tree, and the struct in which an error crosses processes.

Raised anywhere, sent between processes as `ErrorInfo`, and turned into an HTTP or
WebSocket answer in exactly one place (`api/errors.py`).
"""

from __future__ import annotations

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An `OmniError` as data. `kind` is the class name; unknown kinds decode to `StageFailed`."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    stage: str | None = None
    retry_after: float | None = None


class OmniError(Exception):
    """Base of all errors that a caller may see. `message` is a sentence a person can act on."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        stage: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.stage = stage
        self.retry_after = retry_after

    def info(self) -> ErrorInfo:
        """This error as a struct that can be sent to another process."""
        return ErrorInfo(
            kind=type(self).__name__,
            message=self.message,
            param=self.param,
            code=self.code,
            stage=self.stage,
            retry_after=self.retry_after,
        )

    @staticmethod
    def from_info(info: ErrorInfo) -> OmniError:
        """The error that `info` describes, as an instance of its own class."""
        return _KINDS.get(info.kind, StageFailed)(
            info.message,
            param=info.param,
            code=info.code,
            stage=info.stage,
            retry_after=info.retry_after,
        )


class InvalidRequest(OmniError):
    """The caller's fault; `param` names the field."""


class NotFound(InvalidRequest):
    """The caller named a model, voice or job that does not exist."""


class Overloaded(OmniError):
    """Refused at the edge because a bounded queue is full; `retry_after` is in seconds."""


class DeadlineExceeded(OmniError):
    """The request's own deadline passed."""


class StageFailed(OmniError):
    """A stage failed this request; `stage` names it."""


class EngineDead(OmniError):
    """The engine has stopped or cannot serve any request."""


class ConfigError(OmniError):
    """The deployment cannot start as configured."""


_KINDS: dict[str, type[OmniError]] = {
    cls.__name__: cls
    for cls in (
        InvalidRequest,
        NotFound,
        Overloaded,
        DeadlineExceeded,
        StageFailed,
        EngineDead,
        ConfigError,
    )
}
