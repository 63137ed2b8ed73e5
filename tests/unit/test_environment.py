"""What stage processes inherit, and which platform's settings apply."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_async import environment


def test_a_stage_inherits_ours_and_has_its_own_laid_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNI_TEST", "ours")
    assert environment.worker_environment({})["OMNI_TEST"] == "ours"
    assert environment.worker_environment({"OMNI_TEST": "its own"})["OMNI_TEST"] == "its own"


def test_a_stage_has_one_openmp_thread_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment.worker_environment({})["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment.worker_environment({})["OMP_NUM_THREADS"] == "3"
    assert environment.worker_environment({"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("driver", "visible", "platform"),
    [
        (True, None, "cuda"),
        (True, "0,1", "cuda"),
        (True, "", "cpu"),
        (True, "-1", "cpu"),
        (False, None, "cpu"),
    ],
)
def test_the_platform_is_cuda_where_the_driver_is_loaded_and_not_hidden(
    driver: bool, visible: str | None, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.platform() == platform
