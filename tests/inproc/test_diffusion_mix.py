"""The whole engine over a diffusion stage: whatever mix of requests comes and leaves, the scheduler's
invariants hold, nothing is left behind, and each finished picture is its solo picture."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from omni_async import Image, ImageChunk, Omni, Progress, ServerConfig
from tests.tiny.folders import tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    """One engine for all examples; its stage runs in a thread."""
    with Omni(model=str(tiny_folder("stable_diffusion_3")), server=ServerConfig(single_process=True)) as omni:
        yield omni


def request(size: str, steps: int, seed: int) -> Image:
    return Image(prompt="a cat", size=size, num_inference_steps=steps, seed=seed, progress=True)


async def draw(omni: Omni, image: Image, turns: int, leaves_after: int | None) -> NDArray[np.uint8] | None:
    """Come `turns` passes of the loop later; leave after so many steps, if at all."""
    for _ in range(turns):
        await asyncio.sleep(0)
    async with aclosing(omni._omni.generate(image)) as chunks:
        async for chunk in chunks:
            if isinstance(chunk, ImageChunk):
                return chunk.pixels
            if isinstance(chunk, Progress) and leaves_after is not None and chunk.step > leaves_after:
                return None
    raise AssertionError("no picture came")


async def run_mix(omni: Omni, mix: list[Come]) -> list[NDArray[np.uint8] | None]:
    """All of them; afterwards the scheduler holds nothing."""
    calls = [draw(omni, request(*image), turns, leaves) for image, turns, leaves in mix]
    drawn = await asyncio.gather(*calls)
    engine = omni._omni._engine
    assert engine is not None
    engine.scheduler.check()
    assert not engine.scheduler.requests
    assert all(not pool.running and not pool.waiting for pool in engine.scheduler.pools.values())
    return drawn


Come = tuple[tuple[str, int, int], int, int | None]
MIXES = st.lists(
    st.tuples(
        st.tuples(st.sampled_from(["64x64", "96x64", "64x128"]), st.sampled_from([2, 4]), st.integers(0, 1)),
        st.integers(0, 200),
        st.one_of(st.none(), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=20,
)


def test_any_mix_ends_with_the_invariants_true_and_every_picture_its_own(omni: Omni) -> None:
    @cache
    def alone(image: tuple[str, int, int]) -> NDArray[np.uint8]:
        (picture,) = omni._call(run_mix(omni, [(image, 0, None)]))
        return picture

    @given(mix=MIXES)
    @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    def check(mix: list[Come]) -> None:
        for (image, _, leaves), picture in zip(mix, omni._call(run_mix(omni, mix)), strict=True):
            assert picture is not None or leaves is not None
            if picture is not None:
                assert np.abs(picture.astype(int) - alone(image)).max() <= 1

    check()
