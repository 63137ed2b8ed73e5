"""Names for requests that brought none."""

from __future__ import annotations

import itertools
import secrets

_PREFIX = secrets.token_hex(8)
_numbers = itertools.count(1)


def new_id() -> str:
    """Unlike any other, here and in other processes; not a secret. (A uuid costs a system call each.)"""
    return f"{_PREFIX}-{next(_numbers):x}"
