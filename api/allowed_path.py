"""Paths that callers name: only what lies under a folder that the server's owner has allowed."""

from __future__ import annotations

from pathlib import Path


def existing_under(root: str, path: str) -> Path | None:
    """`path` (relative to `root`, or absolute) with `..` and links resolved, when it exists under `root`.

    None otherwise, with no word of whether it exists elsewhere: neither tells what the disk holds.
    """
    try:
        folder = Path(root).resolve()
        found = (folder / path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        # Missing or too long a name; a NUL in it; a ring of links.
        return None
    return found if found.is_relative_to(folder) else None
