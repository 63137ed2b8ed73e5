"""`omni-async check`: what a deploy config resolves to, or what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from omni_async.cli import deployment


def main(argv: Sequence[str]) -> int:
    """Print the resolved pipelines and limits as YAML. A positional that is a YAML file is the config."""
    words = list(argv)
    if words and words[0].endswith((".yaml", ".yml")) and Path(words[0]).is_file():
        words[:1] = ["--deploy-config", words[0]]
    parser = deployment.make_parser("check", "Print what is going to be served.")
    _, resolved = deployment.parse(parser, words)
    print(yaml.safe_dump(msgspec.to_builtins(resolved), sort_keys=False, allow_unicode=True), end="")
    return 0
