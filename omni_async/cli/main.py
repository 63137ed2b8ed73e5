"""`omni-async`: serve · run · check · bench. Each command is imported when it is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from omni_async import __version__
from omni_async.errors import ConfigError, OmniError

COMMANDS = {
    "serve": "serve models over HTTP and WebSocket",
    "run": "answer one request into a file",
    "check": "print what a deploy config resolves to",
    "bench": "measure a running server",
}
USAGE = "usage: omni-async COMMAND [FLAGS]\n\n" + "\n".join(f"  {n:6} {h}" for n, h in COMMANDS.items())


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, 1 when it could not go on, 2 when it was called wrongly."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in COMMANDS:
        print(f"omni-async: no command {words[0]!r}\n{USAGE}", file=sys.stderr)
        return 2
    try:
        return importlib.import_module(f"omni_async.cli.{words[0]}").main(words[1:])
    except OmniError as error:
        print(f"omni-async {words[0]}: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
