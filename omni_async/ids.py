"""Names for requests that brought none."""

from __future__ import annotations

import itertools
import secrets

_PREFIX = secrets.token_hex(8)
_numbers = itertools.count(1)


def new_id() -> str:
    """Unique here and among processes; not a secret. A uuid would cost a system call."""
    return f"{_PREFIX}-{next(_numbers):x}"
