"""`python -m tests.draw_parallel FAMILY EXTRAS OUTPUT`: two pictures by a stage of several processes.

In a process of its own: the library keeps what belongs to a process group for as long as the process lives.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import psutil

from omni_async.config import StageConfig
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.registry import create_executor
from tests.stepping import Ask, ask, guided, run
from tests.tiny.folders import tiny_folder


def asks(family: str) -> list[Ask]:
    """Two requests of different lengths and sizes."""
    longer = ask("a longer prompt", "64x96", steps=3, seed=1, **guided(family, 3.0))
    return [ask("a cat", **guided(family, 4.0)), longer]


def load(family: str, devices: tuple[str, ...] = ("cpu", "cpu"), **extras: Any) -> DiffusionExecutor:
    """The stage, its peers running."""
    config = StageConfig(
        stage_id=0,
        name="diffusion",
        kind="diffusion",
        final_output=True,
        model=str(tiny_folder(family)),
        model_arch=family,
        devices=devices,
        engine_extras=extras,
    )
    executor = create_executor(config)
    assert isinstance(executor, DiffusionExecutor)
    executor.load()
    return executor


if __name__ == "__main__":
    family, extras, output = sys.argv[1:]
    executor = load(family, **json.loads(extras))
    pictures = [answer.media for answer in run(executor, asks(family))]
    executor.close()
    assert not psutil.Process().children()
    np.savez(output, *pictures)
