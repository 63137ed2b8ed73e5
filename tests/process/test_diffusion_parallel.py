"""One network over two processes: the pictures of one, and an end of both when one ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from omni_async.errors import ConfigError
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.executor import StageRequest
from tests.draw_parallel import asks, load
from tests.servers import ROOT, poll_until
from tests.stepping import ask, load_executor, run
from tests.tiny.folders import tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")


KINDS = [
    ("flux", {"ulysses_degree": 2}),
    ("qwen_image", {"ulysses_degree": 2}),
    ("wan", {"ulysses_degree": 2}),
]


@pytest.mark.parametrize(("family", "extras"), KINDS)
def test_two_processes_draw_what_one_draws(family: str, extras: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "pictures.npz"
    words = [sys.executable, "-m", "tests.draw_parallel", family, json.dumps(extras), str(output)]
    subprocess.run(words, check=True, timeout=120, cwd=ROOT)
    together = np.load(output)
    for number, answer in enumerate(run(load_executor(tiny_folder(family), family), asks(family))):
        picture = together[f"arr_{number}"]
        assert np.abs(picture.astype(int) - answer.media).max() <= 1


def test_when_a_peer_dies_the_stage_ends_to_be_started_anew() -> None:
    executor = load("flux", ulysses_degree=2)
    try:
        state = executor.admit(StageRequest(request=1, params=ask("a cat", steps=50).params, seed=0))
        executor.step([state])
        executor.step([state])
        (peer,) = psutil.Process().children()
        peer.kill()
        with pytest.raises(SystemExit):
            _step_often(executor, state)
    finally:
        executor.close()


def _step_often(executor: DiffusionExecutor, state: Any) -> None:
    for _ in range(40):
        executor.step([state])


def test_a_peer_ends_with_its_parent() -> None:
    executor = load("flux", ulysses_degree=2)
    (peer,) = psutil.Process().children()
    assert executor._peers is not None
    process = executor._peers._processes[0]
    assert process.stdin is not None
    process.stdin.close()
    poll_until(lambda: process.poll() is not None, 2.0)
    assert not peer.is_running() or peer.status() == psutil.STATUS_ZOMBIE
    executor.close()


REFUSED: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
    ("flux", {"ulysses_degree": 2}, ("cpu",), "need as many devices"),
    ("flux", {"ulysses_degree": 2, "tensor_parallel_size": 2}, ("cpu",) * 4, "exclude each other"),
    ("flux", {"ulysses_degree": 2, "quantization": "int8"}, ("cpu",) * 2, "cannot be combined"),
    ("flux", {"ring_degree": 2, "cache_backend": "first_block"}, ("cpu",) * 2, "cannot be combined"),
    ("flux", {"ulysses_degree": 2, "enforce_eager": False}, ("cpu",) * 2, "cannot be combined"),
]


@pytest.mark.parametrize(("family", "extras", "devices", "reason"), REFUSED)
def test_what_cannot_be_parallel_is_refused_before_anything_is_started(
    family: str, extras: dict[str, Any], devices: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(family, devices, **extras)
    assert not psutil.Process().children()


@pytest.mark.parametrize(
    ("family", "extras"),
    [("stable_diffusion_3", {"ulysses_degree": 2}), ("flux", {"tensor_parallel_size": 2})],
)
def test_what_the_library_cannot_do_is_refused_and_leaves_no_process(
    family: str, extras: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="cannot be parallel"):
        load(family, **extras)
    assert not psutil.Process().children()
