"""Tiny checkpoints on disk: built once a machine and version of the builders, shared by all test runs."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path


def built_once(name: str, build: Callable[[Path], object]) -> Path:
    """The folder `name`, filled by `build` where it is not there yet."""
    folder = _root() / name
    if not folder.exists():
        part = Path(tempfile.mkdtemp(dir=_root(), prefix=f"{name}-"))
        build(part)
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return folder


@cache
def _root() -> Path:
    """One folder per user, versions of the libraries and text of the builders."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    versions = version("diffusers") + version("transformers")
    digest = hashlib.sha256(sources + versions.encode()).hexdigest()[:12]
    root = Path(tempfile.gettempdir()) / f"omni-tiny-{os.getuid()}-{digest}"
    root.mkdir(mode=0o700, exist_ok=True)
    return root
