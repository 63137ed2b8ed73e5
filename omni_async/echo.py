"""The `Echo` request: text sent back in chunks, for tests and for measuring the engine alone."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class Echo(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`text` comes back `chunks` times, one chunk a step."""

    text: str
    chunks: Annotated[int, Meta(ge=1, le=100_000)] = 1
    model: str | None = None

    def resolve(self) -> dict[str, Any]:
        """The parameters for the stage."""
        return {"text": self.text, "chunks": self.chunks}
