"""Z-Image beginning from an image, beside the library's image-to-image and inpainting pipelines; and what
keeps its rows of several sizes apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.transformers import transformer_z_image
from diffusers.pipelines.z_image.pipeline_z_image_img2img import ZImageImg2ImgPipeline
from diffusers.pipelines.z_image.pipeline_z_image_inpaint import ZImageInpaintPipeline
from numpy.typing import NDArray
from PIL import Image

from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.executor import StageRequest
from tests.stepping import Ask, as_uint8, ask, furthest, load_executor, run
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")

LARGE = "128x96"
"""48 patches: past the 32 to which the network pads the smaller pictures of these tests by itself."""


@cache
def executor(*, deterministic: bool = False) -> DiffusionExecutor:
    return load_executor(tiny_folder("z_image"), "z_image", deterministic=deterministic)


@cache
def stock(kind: Any) -> Any:
    pipe = kind(**stock_pipeline("z_image").components)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def half(height: int, width: int) -> NDArray[np.uint8]:
    """A mask that lets the right half be changed."""
    mask = np.zeros((height, width), np.uint8)
    mask[:, width // 2 :] = 255
    return mask


def changed(wanted: Ask, image: NDArray[Any], mask: NDArray[Any] | None = None) -> Ask:
    tensors = {"image0": image} if mask is None else {"image0": image, "mask": mask}
    return Ask(wanted.params, wanted.seed, tensors)


def from_stock(each: Ask) -> NDArray[np.uint8]:
    """What the library makes of the image, at the size asked for, and of the mask if there is one."""
    size = (each.params["width"], each.params["height"])
    image = Image.fromarray(each.tensors["image0"]).resize(size, Image.Resampling.LANCZOS)
    more: dict[str, Any] = {"image": image, "generator": torch.Generator().manual_seed(each.seed)}
    kind: Any = ZImageImg2ImgPipeline
    if "mask" in each.tensors:
        kind, more["mask_image"] = ZImageInpaintPipeline, Image.fromarray(each.tensors["mask"])
    return as_uint8(stock(kind)(**each.params, **more, output_type="np").images[0])


ASKS = [
    changed(ask("a cat", guidance_scale=4.0, strength=0.75), picture(64, 64)),
    changed(ask("sky", "96x64", steps=6, seed=1, guidance_scale=0.0), picture(64, 96, 1)),
    changed(ask("a boat", "64x32", steps=5, seed=2, negative_prompt="sea", strength=1.0), picture(80, 90)),
    changed(ask("a lake", steps=5, seed=3, guidance_scale=2.0, strength=0.9), picture(64, 64), half(64, 64)),
    changed(ask("tree", "96x64", seed=4, guidance_scale=0.0, strength=0.6), picture(64, 96), half(64, 96)),
]


def test_images_are_changed_as_the_librarys_pipelines_change_them_bit_for_bit() -> None:
    for each, answer in zip(ASKS, run(executor(deterministic=True), ASKS), strict=True):
        assert np.array_equal(answer.media, from_stock(each)), each.params
        assert answer.media.shape == (each.params["height"], each.params["width"], 3)


def test_changed_and_new_pictures_share_steps_and_each_is_as_if_alone() -> None:
    new = [ask("a cat", steps=5, seed=5, guidance_scale=3.0), ask("sky", LARGE, seed=6), ask("sea", seed=7)]
    wanted = [*ASKS, *new]
    together, alone = run(executor(), wanted), [run(executor(), [each])[0] for each in wanted]
    assert furthest(together, alone) < 1e-4
    for one, other in zip(together, alone, strict=True):
        assert np.abs(one.media.astype(int) - other.media).max() <= 1


def test_image_strength_mask_and_prompt_each_change_the_answer() -> None:
    first = changed(ask("a cat", guidance_scale=4.0, strength=0.75), picture(64, 64))
    others = [
        Ask(first.params, first.seed, {"image0": picture(64, 64, 9)}),
        Ask({**first.params, "strength": 0.25}, first.seed, first.tensors),
        Ask(first.params, first.seed, {**first.tensors, "mask": half(64, 64)}),
        Ask({**first.params, "prompt": "an entirely different thing"}, first.seed, first.tensors),
        Ask(first.params, first.seed),
    ]
    latents = [answer.latents for answer in run(executor(), [first, *others])]
    for other in latents[1:]:
        assert float((latents[0] - other).abs().max()) > 1e-3


def test_strength_is_the_share_of_the_steps_that_are_taken() -> None:
    wanted = changed(ask("a cat", steps=8, strength=0.25), picture(64, 64))
    (answer,) = run(executor(), [wanted])
    assert answer.outputs[-1].meta["steps"] == 2


def test_without_the_padding_mask_pictures_of_a_mixed_batch_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [ask("a cat"), ask("sky", LARGE, seed=1)]
    alone = [run(executor(), [each])[0] for each in wanted]
    assert furthest(run(executor(), wanted, staggered=False), alone) < 1e-4
    attend: Callable[..., torch.Tensor] = attention_dispatch.dispatch_attention_fn

    def see_all(*arguments: Any, **named: Any) -> torch.Tensor:
        return attend(*arguments, **{**named, "attn_mask": None})

    monkeypatch.setattr(transformer_z_image, "dispatch_attention_fn", see_all)
    assert furthest(run(executor(), wanted, staggered=False), alone) > 1e-3


def test_a_negative_prompt_takes_part_from_a_scale_above_zero() -> None:
    params = ask("a cat", negative_prompt="bad").params
    executor().admit(StageRequest(request=1, params={**params, "guidance_scale": 0.5}, seed=0))
    with pytest.raises(InvalidRequest) as refused:
        executor().admit(StageRequest(request=2, params={**params, "guidance_scale": 0.0}, seed=0))
    assert refused.value.param == "negative_prompt"
