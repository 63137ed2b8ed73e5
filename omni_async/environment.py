"""The one file that reads the process environment, and sets what vLLM reads there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal


def worker_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a stage process: ours, one OpenMP thread unless said otherwise, then `extra`.

    Small models on all cores at once run many times slower with several threads each.
    """
    return {"OMP_NUM_THREADS": "1", **os.environ, **extra}


def platform() -> Literal["cpu", "cuda"]:
    """What stages run on by default: "cuda" where the NVIDIA driver is loaded and not hidden."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "unset") in ("", "-1")
    return "cuda" if Path("/dev/nvidiactl").exists() and not hidden else "cpu"


def prepare_vllm() -> None:
    """Before vLLM is imported: one process, its threads left to `OMP_NUM_THREADS`, no usage statistics, and
    media only as arrays that came with the request. What the operator has set stays, but for the last."""
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_MEDIA_CONNECTOR"] = "omni_async"
