"""Stable Diffusion XL beside the library's own pipeline: schedulers that draw noise or keep a history,
guidance by zeros or by an empty prompt, a VAE that overflows in float16, networks that take the scale."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, UNet2DConditionModel
from numpy.typing import NDArray

from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.executor import StageRequest
from tests.stepping import Ask, as_uint8, ask, furthest, load_executor, run
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")

SCHEDULERS: dict[str, dict[str, Any]] = {
    "EulerAncestralDiscreteScheduler": {},
    "DDIMScheduler": {"clip_sample": False, "steps_offset": 1},
    "DPMSolverMultistepScheduler": {"algorithm_type": "sde-dpmsolver++", "use_karras_sigmas": True},
    "UniPCMultistepScheduler": {},
    "HeunDiscreteScheduler": {},
    "EulerDiscreteScheduler": {"prediction_type": "v_prediction"},
}


@cache
def executor(folder: Path, *, deterministic: bool = False, **extras: Any) -> DiffusionExecutor:
    return load_executor(folder, "stable_diffusion_xl", deterministic=deterministic, **extras)


@cache
def stock(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def from_stock(folder: Path, each: Ask, dtype: torch.dtype = torch.float32) -> NDArray[np.uint8]:
    generator = torch.Generator().manual_seed(each.seed)
    return as_uint8(stock(folder, dtype)(**each.params, generator=generator, output_type="np").images[0])


def changed(folder: Path, change: Callable[[Any], None]) -> Path:
    """The tiny checkpoint with something else about it."""
    pipe = stock_pipeline("stable_diffusion_xl")
    change(pipe)
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=SCHEDULERS)
def scheduled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def change(pipe: Any) -> None:
        kind = getattr(diffusers, request.param)
        pipe.scheduler = kind.from_config(pipe.scheduler.config, **SCHEDULERS[request.param])

    return changed(tmp_path_factory.mktemp(request.param), change)


ASKS = [
    ask("a cat", steps=4, guidance_scale=4.0),
    ask("a very long prompt about dogs", steps=6, seed=1, guidance_scale=1.0),
    ask("sky", steps=3, seed=2, guidance_scale=7.0, negative_prompt="bad"),
    ask("a boat", "72x40", steps=5, seed=3, guidance_scale=3.0, negative_prompt=""),
    ask("sea", "72x40", steps=4, seed=4),
]


def test_every_schedulers_pictures_equal_the_librarys_bit_for_bit(scheduled: Path) -> None:
    for each, answer in zip(ASKS, run(executor(scheduled, deterministic=True), ASKS), strict=True):
        theirs = from_stock(scheduled, each)
        assert np.array_equal(answer.media, theirs), each.params
        assert theirs.std() > 1


def test_requests_in_company_have_noise_and_history_of_their_own(scheduled: Path) -> None:
    together = run(executor(scheduled), ASKS)
    alone = [run(executor(scheduled), [each])[0] for each in ASKS]
    assert furthest(together, alone) < 1e-4
    for one, other in zip(together, alone, strict=True):
        assert np.abs(one.media.astype(int) - other.media).max() <= 1


def test_prompt_seed_guidance_and_negative_prompt_each_change_the_picture() -> None:
    made, first = executor(tiny_folder("stable_diffusion_xl")), ASKS[0]
    others = [
        Ask({**first.params, "prompt": "an entirely different thing"}, first.seed),
        Ask(first.params, first.seed + 1),
        Ask({**first.params, "guidance_scale": 9.0}, first.seed),
        Ask({**first.params, "negative_prompt": "bad"}, first.seed),
    ]
    latents = [answer.latents for answer in run(made, [first, *others])]
    for other in latents[1:]:
        assert float((latents[0] - other).abs().max()) > 1e-3


def test_no_negative_prompt_is_zeros_where_the_model_asks_for_that_and_else_an_empty_one(
    tmp_path: Path,
) -> None:
    def change(pipe: Any) -> None:
        pipe.register_to_config(force_zeros_for_empty_prompt=False)

    asked, empty = ask("a cat"), ask("a cat", negative_prompt="")
    zeros = tiny_folder("stable_diffusion_xl")
    for folder, differ in ((zeros, True), (changed(tmp_path, change), False)):
        unsaid, said = run(executor(folder, deterministic=True), [asked, empty])
        assert np.array_equal(unsaid.media, from_stock(folder, asked))
        assert np.array_equal(said.media, from_stock(folder, empty))
        assert np.array_equal(unsaid.media, said.media) != differ


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_equals_the_librarys_whose_vae_may_run_in_float32(dtype: str) -> None:
    folder = tiny_folder("stable_diffusion_xl")
    made = executor(folder, deterministic=True, dtype=dtype)
    assert made.adapter.pipe.vae.dtype == (torch.float32 if dtype == "float16" else torch.bfloat16)
    for each, answer in zip(ASKS[:3], run(made, ASKS[:3]), strict=True):
        assert np.array_equal(answer.media, from_stock(folder, each, getattr(torch, dtype)))


def test_latents_with_a_mean_and_a_deviation_are_decoded_as_the_library_does(tmp_path: Path) -> None:
    def change(pipe: Any) -> None:
        scale = {"latents_mean": [0.3, -0.2, 0.1, 0.5], "latents_std": [1.5, 0.7, 1.1, 0.9]}
        vae: Any = AutoencoderKL.from_config({**pipe.vae.config, **scale})
        vae.load_state_dict(pipe.vae.state_dict())
        pipe.vae = vae

    folder = changed(tmp_path, change)
    (answer,) = run(executor(folder, deterministic=True), ASKS[:1])
    assert np.array_equal(answer.media, from_stock(folder, ASKS[0]))
    assert not np.array_equal(answer.media, from_stock(tiny_folder("stable_diffusion_xl"), ASKS[0]))


def test_a_network_that_takes_the_scale_has_no_second_row_and_no_negative_prompt(tmp_path: Path) -> None:
    def change(pipe: Any) -> None:
        torch.manual_seed(2)
        pipe.unet = UNet2DConditionModel.from_config({**pipe.unet.config, "time_cond_proj_dim": 32})
        pipe.scheduler = diffusers.LCMScheduler.from_config(pipe.scheduler.config)

    folder = changed(tmp_path, change)
    made = executor(folder, deterministic=True)
    wanted = [ask("a cat", guidance_scale=8.0), ask("a cat", guidance_scale=2.0), ask("sky", steps=2, seed=1)]
    answers = run(made, wanted)
    for each, answer in zip(wanted, answers, strict=True):
        assert np.array_equal(answer.media, from_stock(folder, each)), each.params
    assert furthest(run(executor(folder), wanted), answers) < 1e-4
    assert not np.array_equal(answers[0].media, answers[1].media)
    with pytest.raises(InvalidRequest) as refused:
        made.admit(StageRequest(request=1, params=ask("a cat", negative_prompt="bad").params, seed=0))
    assert refused.value.param == "negative_prompt"


def test_what_a_velocity_foresees_is_what_the_scheduler_foresees(tmp_path: Path) -> None:
    def change(pipe: Any) -> None:
        kind = diffusers.EulerDiscreteScheduler
        pipe.scheduler = kind.from_config(pipe.scheduler.config, prediction_type="v_prediction")

    made = executor(changed(tmp_path, change))
    state = made.admit(StageRequest(request=1, params=ASKS[0].params, seed=0))
    made.step([state])
    for _ in range(3):
        torch.manual_seed(state.index)
        prediction = torch.randn_like(state.latents)
        foreseen = made.adapter.estimate(state, prediction)
        taken = state.scheduler.step(prediction, state.timestep, state.latents)
        assert torch.allclose(foreseen, taken.pred_original_sample, atol=1e-4)
        state.latents, state.index = taken.prev_sample, state.index + 1


def test_sides_are_multiples_of_eight() -> None:
    made = executor(tiny_folder("stable_diffusion_xl"))
    with pytest.raises(InvalidRequest) as refused:
        made.admit(StageRequest(request=1, params=ask("a cat", "68x64").params, seed=0))
    assert refused.value.param == "size"
