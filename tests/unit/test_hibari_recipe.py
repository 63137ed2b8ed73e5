"""The training recipe of the sampled talker, run for some seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from omni_async.stages.models.hibari.sampler import Sampler

ROOT = Path(__file__).parents[2]


def test_the_recipe_learns_and_its_weights_load(tmp_path: Path) -> None:
    output = tmp_path / "talker.safetensors"
    done = subprocess.run(
        [sys.executable, "examples/train_hibari_talker.py"]
        + ["--minutes", "0.06", "--sentences", "64", "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (timing, codes) = re.findall(r"held-out timing ([\d.]+), codes ([\d.]+)", done.stdout)[-1]
    # A guess among 64 costs ln 64 = 4.16; a coin for the timing, 0.69.
    assert float(codes) < 4.14
    assert float(timing) < 0.66
    Sampler(output)
