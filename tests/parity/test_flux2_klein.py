"""FLUX.2 Klein with up to four images, distilled or not, beside the library's own pipeline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from numpy.typing import NDArray
from PIL import Image

from omni_async import deploy
from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.executor import StageRequest
from omni_async.stages.registry import create_executor
from tests.stepping import Ask, as_uint8, ask, furthest, load_executor, run
from tests.tiny.folders import tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with the mark of a distilled one."""
    folder = tmp_path_factory.mktemp("klein") / "distilled"
    shutil.copytree(tiny_folder("flux2_klein"), folder)
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "is_distilled": True}))
    return folder


@cache
def executor(*, deterministic: bool = False) -> DiffusionExecutor:
    return load_executor(tiny_folder("flux2_klein"), "flux2_klein", deterministic=deterministic)


@cache
def stock(folder: Path) -> Any:
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def edit(wanted: Ask, *images: NDArray[Any]) -> Ask:
    return Ask(wanted.params, wanted.seed, {f"image{number}": each for number, each in enumerate(images)})


def from_stock(each: Ask, folder: Path | None = None) -> NDArray[np.uint8]:
    images = [Image.fromarray(image) for image in each.tensors.values()] or None
    generator = torch.Generator().manual_seed(each.seed)
    pipe = stock(folder or tiny_folder("flux2_klein"))
    return as_uint8(pipe(**each.params, image=images, output_type="np", generator=generator).images[0])


WIDE, TALL = picture(64, 128), picture(128, 64, 1)
ASKS = [
    ask("a cat", guidance_scale=4.0),
    edit(ask("sky", "96x64", steps=3, seed=1, guidance_scale=1.0), WIDE),
    edit(ask("sea", "96x64", steps=5, seed=2, guidance_scale=6.0), TALL),
    edit(ask("two", steps=2, seed=3), picture(70, 90, 2), WIDE),
    edit(ask("four", steps=2, seed=4), WIDE, TALL, picture(64, 64, 3), picture(64, 64, 4)),
]


def as_if_alone(wanted: Sequence[Ask], *, staggered: bool = True) -> None:
    together = run(executor(), wanted, staggered=staggered)
    alone = [run(executor(), [each])[0] for each in wanted]
    assert furthest(together, alone) < 1e-4
    for one, other in zip(together, alone, strict=True):
        assert np.abs(one.media.astype(int) - other.media).max() <= 1


def test_pictures_from_none_to_four_images_equal_the_library_bit_for_bit() -> None:
    for each, answer in zip(ASKS, run(executor(deterministic=True), ASKS), strict=True):
        assert np.array_equal(answer.media, from_stock(each)), each.params
        assert answer.media.shape == (each.params["height"], each.params["width"], 3)


def test_requests_with_and_without_images_get_what_they_would_get_alone() -> None:
    as_if_alone(ASKS)


def test_images_of_as_many_tokens_but_another_shape_keep_their_own_positions() -> None:
    as_if_alone(
        [
            edit(ask("a cat"), WIDE),
            edit(ask("a cat", seed=1), TALL),
            edit(ask("a cat", seed=2), picture(64, 64, 3), picture(64, 64, 4)),
            edit(ask("sky", seed=3, guidance_scale=1.0), WIDE),
        ],
        staggered=False,
    )


def test_images_of_one_shape_share_a_step() -> None:
    states = []
    for number, image in enumerate((WIDE, picture(64, 128, 7), TALL)):
        wanted = edit(ask("a cat"), image)
        request = StageRequest(request=number, params=wanted.params, seed=0, tensors=wanted.tensors)
        states.append(executor().admit(request))
        executor().step(states[-1:])
    keys = [state.batch_key for state in states]
    assert keys[0] == keys[1]
    assert keys[0] != keys[2]


def test_images_their_order_prompt_and_guidance_each_change_the_answer() -> None:
    first = edit(ask("a cat"), WIDE, TALL)
    others = [
        edit(ask("a cat"), TALL, WIDE),
        edit(ask("a cat"), WIDE),
        ask("a cat"),
        edit(ask("an entirely different thing"), WIDE, TALL),
        edit(ask("a cat", seed=1), WIDE, TALL),
        edit(ask("a cat", guidance_scale=9.0), WIDE, TALL),
    ]
    latents = [answer.latents for answer in run(executor(), [first, *others])]
    for other in latents[1:]:
        assert float((latents[0] - other).abs().max()) > 1e-3


def test_images_the_model_cannot_see_fail_their_own_request() -> None:
    narrow, good = run(executor(), [edit(ask("a cat"), picture(640, 64)), ASKS[1]])
    assert isinstance(narrow.error, InvalidRequest)
    assert narrow.error.param == "image"
    assert np.abs(good.media.astype(int) - from_stock(ASKS[1])).max() <= 1


def test_a_distilled_checkpoint_is_served_unguided_and_refuses_a_guidance_scale(distilled: Path) -> None:
    pipeline = deploy.load(model=str(distilled)).pipelines[0]
    (stage,) = pipeline.stages
    made: Any = create_executor(stage)
    made.load()
    for seed, images in enumerate(((), (WIDE, TALL))):
        wanted = edit(ask("a cat", seed=seed), *images)
        params = {**stage.default_sampling_params, **wanted.params}
        (answer,) = run(made, [Ask(params, seed, wanted.tensors)])
        assert np.array_equal(answer.media, from_stock(wanted, distilled))
        assert not np.array_equal(answer.media, from_stock(wanted))
    with pytest.raises(InvalidRequest) as refused:
        made.admit(StageRequest(request=1, params=ask("a cat", guidance_scale=4.0).params, seed=0))
    assert refused.value.param == "guidance_scale"
    assert pipeline.image is not None
    assert (pipeline.image.max_images, pipeline.image.needs_image) == (4, False)
