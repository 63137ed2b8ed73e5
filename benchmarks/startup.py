"""How soon is it there, and how big? `python -m benchmarks.startup`."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from benchmarks.report import goal, save, table
from benchmarks.servers import ours, serving

ROUNDS = 5
IMPORT = """
import time
began = time.perf_counter()
from omni_async import AsyncOmni
print(time.perf_counter() - began)
"""


def import_seconds() -> float:
    """In a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    """Import, start with the echo pipeline to its first answer, resident memory of the API process."""
    imports = [import_seconds() for _ in range(ROUNDS)]
    ready: list[float] = []
    resident: list[float] = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with serving("omni_async", ours("echo"), "/v1/echo", {"text": "hello"}) as server:
            ready.append(time.perf_counter() - began)
            resident.append(server.tree()[0].memory_info().rss / 1e6)
    rows = [
        ("import omni_async and AsyncOmni, s", median(imports), max(imports)),
        ("first echo answer, s", median(ready), max(ready)),
        ("API process, MB", median(resident), max(resident)),
    ]
    table("start-up", ("", "median", "worst"), rows)
    print()
    goals = [
        goal("seconds to import omni_async with AsyncOmni", median(imports), 0.3, at_least=False),
        goal("seconds to the first echo answer", median(ready), 1.5, at_least=False),
        goal("MB resident in the API process", median(resident), 120, at_least=False),
    ]
    save("startup", {"import_s": imports, "ready_s": ready, "resident_mb": resident, "goals": goals})


if __name__ == "__main__":
    main()
