"""Stable Diffusion 3 beginning from an image, beside the library's image-to-image and inpainting pipelines;
under dynamic shifting; and what keeps its rows of several sizes apart."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3InpaintPipeline,
    StableDiffusion3Pipeline,
)
from numpy.typing import NDArray
from PIL import Image

from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.executor import StageRequest
from tests.stepping import Ask, as_uint8, ask, furthest, load_executor, run
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 16 latent channels, as all published ones: the library's inpainting takes no others."""
    folder, pipe = tmp_path_factory.mktemp("sixteen"), stock_pipeline("stable_diffusion_3")
    torch.manual_seed(0)
    channels = {"in_channels": 16, "out_channels": 16}
    pipe.transformer = SD3Transformer2DModel.from_config({**pipe.transformer.config, **channels})
    pipe.vae = AutoencoderKL.from_config({**pipe.vae.config, "latent_channels": 16})
    pipe.save_pretrained(folder)
    return folder


@cache
def executor(folder: Path, *, deterministic: bool = False) -> DiffusionExecutor:
    return load_executor(folder, "stable_diffusion_3", deterministic=deterministic)


@cache
def stock(folder: Path, kind: Any = StableDiffusion3Pipeline) -> Any:
    pipe = kind.from_pretrained(folder, dtype=torch.float32)
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
    return Ask(wanted.params, wanted.seed, {"image0": image} | ({} if mask is None else {"mask": mask}))


def latents_from_stock(folder: Path, each: Ask) -> torch.Tensor:
    more: dict[str, Any] = {"image": Image.fromarray(each.tensors["image0"])}
    kind: Any = StableDiffusion3Img2ImgPipeline
    if "mask" in each.tensors:
        kind, more["mask_image"] = StableDiffusion3InpaintPipeline, Image.fromarray(each.tensors["mask"])
    generator = torch.Generator().manual_seed(each.seed)
    return stock(folder, kind)(**each.params, **more, generator=generator, output_type="latent").images


@torch.no_grad()
def decoded(folder: Path, latents: torch.Tensor) -> NDArray[np.uint8]:
    """As the library decodes, except that its inpainting pipeline leaves the VAE's shift out."""
    pipe = stock(folder)
    config = pipe.vae.config
    pixels = pipe.vae.decode(latents / config.scaling_factor + config.shift_factor).sample
    return as_uint8(pipe.image_processor.postprocess(pixels, output_type="np")[0])


ASKS = [
    changed(ask("a cat", guidance_scale=4.0, strength=0.75), picture(64, 64)),
    changed(ask("sky", "96x64", steps=6, seed=1, guidance_scale=1.0), picture(64, 96, 1)),
    changed(ask("a boat", "64x32", steps=5, seed=2, negative_prompt="sea", strength=1.0), picture(80, 90)),
    changed(ask("a lake", steps=5, seed=3, guidance_scale=2.0, strength=0.9), picture(64, 64), half(64, 64)),
    changed(ask("tree", "96x64", seed=4, guidance_scale=1.0, strength=0.6), picture(64, 96), half(64, 96)),
    changed(ask("a hill", seed=5, guidance_scale=3.0, strength=1.0), picture(64, 64, 2), half(64, 64)),
]


def test_images_are_changed_as_the_librarys_pipelines_change_them_bit_for_bit(sixteen: Path) -> None:
    for each, answer in zip(ASKS, run(executor(sixteen, deterministic=True), ASKS), strict=True):
        theirs = latents_from_stock(sixteen, each)
        assert torch.equal(answer.latents, theirs), each.params
        assert np.array_equal(answer.media, decoded(sixteen, theirs)), each.params
        if "mask" not in each.tensors:
            pipe, generator = stock(sixteen, StableDiffusion3Img2ImgPipeline), torch.Generator()
            image = Image.fromarray(each.tensors["image0"])
            whole = pipe(
                **each.params, image=image, generator=generator.manual_seed(each.seed), output_type="np"
            )
            assert np.array_equal(answer.media, as_uint8(whole.images[0]))


def test_changed_and_new_pictures_share_steps_and_each_is_as_if_alone(sixteen: Path) -> None:
    wanted = [*ASKS, ask("a cat", steps=5, seed=5), ask("sky", "128x96", seed=6, guidance_scale=1.0)]
    together, alone = run(executor(sixteen), wanted), [run(executor(sixteen), [each])[0] for each in wanted]
    assert furthest(together, alone) < 1e-4
    for one, other in zip(together, alone, strict=True):
        assert np.abs(one.media.astype(int) - other.media).max() <= 1


def test_image_strength_mask_and_prompt_each_change_the_answer(sixteen: Path) -> None:
    first = ASKS[0]
    others = [
        Ask(first.params, first.seed, {"image0": picture(64, 64, 9)}),
        Ask({**first.params, "strength": 0.25}, first.seed, first.tensors),
        Ask(first.params, first.seed, {**first.tensors, "mask": half(64, 64)}),
        Ask({**first.params, "prompt": "an entirely different thing"}, first.seed, first.tensors),
        Ask(first.params, first.seed),
    ]
    latents = [answer.latents for answer in run(executor(sixteen), [first, *others])]
    for other in latents[1:]:
        assert float((latents[0] - other).abs().max()) > 1e-3


def test_what_a_mask_protects_is_the_images_own_latents(sixteen: Path) -> None:
    protected = np.zeros((64, 64), np.uint8)
    wanted = changed(ask("a cat", strength=0.9), picture(64, 64), protected)
    others = [changed(ask(prompt, strength=0.9), picture(64, 64), protected) for prompt in ("a dog", "sea")]
    one, *more = run(executor(sixteen), [wanted, *others])
    for other in more:
        assert torch.equal(one.latents, other.latents)


def test_a_shift_by_the_number_of_patches_is_the_librarys(tmp_path: Path) -> None:
    pipe = stock_pipeline("stable_diffusion_3")
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    pipe.save_pretrained(tmp_path)
    wanted = [ask("a cat"), ask("sky", "128x96", steps=5, seed=1, guidance_scale=1.0)]
    for each, answer in zip(wanted, run(executor(tmp_path, deterministic=True), wanted), strict=True):
        generator = torch.Generator().manual_seed(each.seed)
        theirs = stock(tmp_path)(**each.params, generator=generator, output_type="np").images[0]
        assert np.array_equal(answer.media, as_uint8(theirs))


def test_without_positions_of_its_own_a_row_of_a_mixed_batch_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = executor(tiny_folder("stable_diffusion_3"))
    wanted = [ask("a cat"), ask("sky", "64x128", seed=1)]
    alone = [run(made, [each])[0] for each in wanted]
    embed: Any = made.adapter.transformer.pos_embed
    crop = embed.cropped_pos_embed
    monkeypatch.setattr(embed, "cropped_pos_embed", lambda height, width: 0 * crop(height, width))
    assert furthest(run(made, wanted, staggered=False), alone) > 1e-3


@pytest.mark.parametrize("size", ["72x64", "1552x64"])
def test_sizes_that_the_network_has_no_positions_for_are_refused(size: str) -> None:
    made = executor(tiny_folder("stable_diffusion_3"))
    with pytest.raises(InvalidRequest) as refused:
        made.admit(StageRequest(request=1, params=ask("a cat", size).params, seed=0))
    assert refused.value.param == "size"
