"""One speech server for all tests that need a real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import Server, serve


@pytest.fixture(scope="session")
def speech_server() -> Iterator[Server]:
    """`omni-async serve` with the built-in pipelines."""
    with serve() as server:
        yield server
