"""The training recipe of the sampled talker, run for some seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from omni_async.stages.models.hibari.sampler import Sampler

ROOT = Path(__file__).parents[2]
QUICK = ("--minutes", "0.08", "--sentences", "64")


def test_the_recipe_learns_and_its_weights_load(tmp_path: Path) -> None:
    output = tmp_path / "talker.safetensors"
    done = subprocess.run(
        [sys.executable, "examples/train_hibari_talker.py", *QUICK, "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(r"held-out timing ([\d.]+), codes ([\d.]+)", done.stdout)
    (timing, codes), (timing_after, codes_after) = (tuple(map(float, pair)) for pair in (told[0], told[-1]))
    assert timing_after < timing - 0.03
    assert codes_after < codes - 0.03
    Sampler(output)
