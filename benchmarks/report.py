"""One table printed and one JSON written, with the machine and commit that the figures belong to."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns as wide as they need to be; numbers with three significant digits."""
    cells = [list(header), *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def goal(text: str, measured: float, bound: float, *, at_least: bool) -> dict[str, Any]:
    """Say whether a goal is met."""
    met = measured >= bound if at_least else measured <= bound
    sign = "≥" if at_least else "≤"
    print(f"{'met   ' if met else 'MISSED'} {text}: {measured:.3g} (goal {sign} {bound:g})", flush=True)
    return {"goal": text, "measured": measured, "bound": bound, "at_least": at_least, "met": met}


def save(name: str, content: dict[str, Any]) -> None:
    """Write `results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    about = {
        "machine": f"{platform.machine()}, {psutil.cpu_count()} cores, Python {platform.python_version()}",
        "commit": commit.strip(),
        "load_average": psutil.getloadavg(),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps({**about, **content}, indent=1) + "\n")
