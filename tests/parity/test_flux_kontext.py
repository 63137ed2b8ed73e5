"""FLUX.1 Kontext with and without an image, beside the library's own pipeline."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from numpy.typing import NDArray
from PIL import Image

from omni_async import deploy
from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.models.flux import adapter as flux
from omni_async.stages.models.flux_kontext import adapter as flux_kontext
from omni_async.stages.registry import create_executor
from tests.stepping import Ask, as_uint8, ask, furthest, load_executor, run
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def trained_sizes_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library enlarges images to about a megapixel; here both it and we take these."""
    for module in (pipeline_flux_kontext, flux_kontext):
        monkeypatch.setattr(module, "PREFERRED_KONTEXT_RESOLUTIONS", [(64, 96), (96, 64), (64, 64)])


@cache
def executor(*, deterministic: bool = False) -> DiffusionExecutor:
    return load_executor(tiny_folder("flux_kontext"), "flux_kontext", deterministic=deterministic)


@cache
def stock() -> Any:
    return stock_pipeline("flux_kontext")


def picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def edit(wanted: Ask, image: NDArray[Any]) -> Ask:
    return Ask(wanted.params, wanted.seed, {"image0": image})


def from_stock(each: Ask) -> NDArray[np.uint8]:
    """What the library makes; `max_area` keeps it at the size asked for."""
    area = each.params["width"] * each.params["height"]
    more = {"image": Image.fromarray(each.tensors["image0"])} if each.tensors else {}
    generator = torch.Generator().manual_seed(each.seed)
    made = stock()(**each.params, **more, max_area=area, output_type="np", generator=generator)
    return as_uint8(made.images[0])


ASKS = [
    edit(ask("a cat"), picture(64, 96)),
    edit(ask("sky", "96x64", steps=3, seed=1, guidance_scale=7.0), picture(130, 70)),
    edit(ask("sea", "32x64", steps=5, seed=2, negative_prompt="sky", true_cfg_scale=3.0), picture(64, 64)),
    ask("a boat", "64x96", steps=3, seed=3, guidance_scale=2.0),
    ask("a long prompt about dogs", steps=6, seed=4, negative_prompt="", true_cfg_scale=2.0),
]


def test_edits_and_new_pictures_equal_the_library_bit_for_bit_at_the_size_asked_for() -> None:
    for each, answer in zip(ASKS, run(executor(deterministic=True), ASKS), strict=True):
        assert np.array_equal(answer.media, from_stock(each)), each.params
        assert answer.media.shape == (each.params["height"], each.params["width"], 3)


def test_an_images_trained_size_is_chosen_after_its_sides_are_rounded_down() -> None:
    """64 × 79 is nearer to 64 × 96, but the library looks at 64 × 64."""
    wanted = edit(ask("a cat"), picture(79, 64))
    (answer,) = run(executor(deterministic=True), [wanted])
    assert np.array_equal(answer.media, from_stock(wanted))


def test_edits_of_images_of_several_shapes_share_steps_and_each_is_as_if_alone() -> None:
    together, alone = run(executor(), ASKS), [run(executor(), [each])[0] for each in ASKS]
    assert furthest(together, alone) < 1e-4
    for one, other in zip(together, alone, strict=True):
        assert np.abs(one.media.astype(int) - other.media).max() <= 1


def test_without_the_padding_mask_edits_of_a_mixed_batch_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [ask("a cat"), edit(ask("a cat", seed=1), picture(64, 96))]
    alone = [run(executor(), [each])[0] for each in wanted]
    stack = flux.pad_stack

    def stack_unmasked(rows: Any) -> Any:
        padded, mask = stack(rows)
        return padded, None if mask is None else torch.ones_like(mask)

    monkeypatch.setattr(flux, "pad_stack", stack_unmasked)
    assert furthest(run(executor(), wanted, staggered=False), alone) > 1e-3


def test_image_prompt_seed_and_guidance_each_change_the_answer() -> None:
    first = edit(ask("a cat"), picture(64, 96))
    others = [
        edit(first, picture(64, 96, 9)),
        Ask(first.params, first.seed),
        edit(ask("an entirely different thing"), picture(64, 96)),
        edit(ask("a cat", seed=1), picture(64, 96)),
        edit(ask("a cat", guidance_scale=9.0), picture(64, 96)),
    ]
    latents = [answer.latents for answer in run(executor(), [first, *others])]
    for other in latents[1:]:
        assert float((latents[0] - other).abs().max()) > 1e-3


def test_an_image_too_small_for_the_model_fails_its_own_request() -> None:
    small, good = run(executor(), [edit(ask("a cat"), picture(12, 200)), ASKS[0]])
    assert isinstance(small.error, InvalidRequest)
    assert small.error.param == "image"
    assert np.abs(good.media.astype(int) - from_stock(ASKS[0])).max() <= 1


def test_a_served_folder_edits_under_the_pipelines_own_defaults() -> None:
    pipeline = deploy.load(model=str(tiny_folder("flux_kontext"))).pipelines[0]
    (stage,) = pipeline.stages
    made = create_executor(stage)
    made.load()
    wanted = edit(ask("a cat", steps=3, seed=5), picture(64, 96))
    (answer,) = run(made, [Ask({**stage.default_sampling_params, **wanted.params}, 5, wanted.tensors)])
    assert np.array_equal(answer.media, from_stock(wanted))
    assert stage.default_sampling_params["num_inference_steps"] == 28
    assert pipeline.image is not None
    assert (pipeline.image.max_images, pipeline.image.needs_image) == (1, False)
