"""Every family beside the library's own pipeline on the same weights and seeds: alone, and in company."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from numpy.typing import NDArray
from PIL import Image

from omni_async.stages.diffusion import padding
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.models.flux_kontext import adapter as flux_kontext
from omni_async.stages.models.qwen_image_edit import adapter as qwen_image_edit
from tests.stepping import Ask, as_uint8, ask, furthest, guided, load_executor, run
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")

SCALE = {"qwen_image": "true_cfg_scale", "qwen_image_edit": "true_cfg_scale"}
PICTURES = [
    *("qwen_image", "flux", "flux_kontext", "flux2_klein", "stable_diffusion_3", "stable_diffusion_xl"),
    *("z_image", "sana", "wan"),
]
MIXING = ["qwen_image", "flux", "flux_kontext", "stable_diffusion_3", "z_image"]
FAMILIES = [*PICTURES, "qwen_image_edit", "stable_audio"]
IMAGE = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def input_images_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both editing pipelines enlarge images to a megapixel, in the library and here: here, to 64 × 96."""
    size = [(64, 96), (96, 64)]
    for module in (pipeline_flux_kontext, flux_kontext):
        monkeypatch.setattr(module, "PREFERRED_KONTEXT_RESOLUTIONS", size)
    for module in (pipeline_qwenimage_edit, qwen_image_edit):
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: (96, 64, None))


@cache
def executor(family: str, *, deterministic: bool = False) -> DiffusionExecutor:
    return load_executor(tiny_folder(family), family, deterministic=deterministic)


@cache
def stock(family: str) -> Any:
    return stock_pipeline(family)


def asks(family: str) -> list[Ask]:
    """Requests that differ in all that may differ within a batch."""
    negative: dict[str, Any] = {} if family.startswith("flux") else {"negative_prompt": "bad"}
    if family == "stable_audio":
        return [
            sound("a drum", 8.0, 4, 0),
            sound("rain", 8.0, 5, 1, negative_prompt="noise", guidance_scale=4.0),
            sound("a long and quiet song", 5.0, 3, 2, guidance_scale=1.0),
        ]
    if family == "qwen_image_edit":
        changed = [
            ask("a cat", true_cfg_scale=1.0),
            ask("sky", steps=3, seed=1, true_cfg_scale=3.0),
            ask("a lake", "96x64", steps=3, seed=2, negative_prompt="boats"),
        ]
        return [Ask(each.params, each.seed, {"image0": IMAGE}) for each in changed]
    found = [
        ask("a cat", **guided(family, 4.0)),
        ask("a very long prompt about dogs", steps=6, seed=1, **guided(family, 5.0)),
        ask(
            "sky",
            steps=3,
            seed=2,
            **guided(family, 6.0),
            **negative,
        ),
        ask("red car", steps=5, seed=3, **guided(family, 1.0 if family != "z_image" else 0.0)),
        ask("a boat", "96x64", steps=4, seed=4, **guided(family, 3.0)),
        ask("two boats", "32x128", steps=3, seed=5, **guided(family, 3.0)),
    ]
    if family in ("flux", "flux_kontext"):
        found.append(ask("tree", steps=4, seed=6, negative_prompt="bush", true_cfg_scale=2.0))
    if family in ("flux_kontext", "flux2_klein"):
        found.append(Ask(ask("hat", steps=2, seed=7).params, 7, {"image0": IMAGE}))
    if family == "wan":
        found.append(ask("a film", steps=3, seed=8, num_frames=5))
    return found


def sound(prompt: str, seconds: float, steps: int, seed: int, **params: Any) -> Ask:
    return Ask({"prompt": prompt, "seconds": seconds, "num_inference_steps": steps, **params}, seed)


def from_stock(family: str, each: Ask) -> NDArray[Any]:
    """What the library's pipeline makes of the same request."""
    params: dict[str, Any] = dict(each.params)
    if family == "stable_audio":
        params["audio_end_in_s"] = params.pop("seconds")
    else:
        params["output_type"] = "np"
    if family in SCALE:
        params.setdefault("negative_prompt", " ")
    if family == "wan":
        params.setdefault("num_frames", 1)
    if family == "sana":
        params["use_resolution_binning"] = False
    if family == "flux_kontext":
        params["max_area"] = params["width"] * params["height"]
    if each.tensors:
        params["image"] = Image.fromarray(each.tensors["image0"])
    made = stock(family)(**params, generator=torch.Generator().manual_seed(each.seed))[0][0]
    if family == "stable_audio":
        return np.asarray(made).T
    return as_uint8(np.asarray(made))[0 if params.get("num_frames") == 1 else slice(None)]


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_rows_are_the_librarys_own_bit_for_bit_whatever_runs_beside(family: str) -> None:
    wanted = asks(family)
    answers = run(executor(family, deterministic=True), wanted)
    for each, answer in zip(wanted, answers, strict=True):
        theirs = from_stock(family, each)
        assert np.array_equal(answer.media, theirs), each.params
        assert theirs.std() > 0.05, "nothing is to be seen or heard, so equality says nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_join_a_running_batch_get_what_they_would_get_alone(family: str) -> None:
    wanted = asks(family)
    together = run(executor(family), wanted)
    alone = [run(executor(family), [each])[0] for each in wanted]
    assert furthest(together, alone) < 1e-4
    for one, other in zip(together, alone, strict=True):
        assert np.abs(one.media.astype(float) - other.media).max() <= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_seed_and_guidance_each_change_the_answer(family: str) -> None:
    first = asks(family)[0]
    others = [
        Ask({**first.params, "prompt": "an entirely different thing"}, first.seed, first.tensors),
        Ask(first.params, first.seed + 1, first.tensors),
        Ask({**first.params, **guided(family, 9.0)}, first.seed, first.tensors),
    ]
    latents = [answer.latents for answer in run(executor(family), [first, *others])]
    for other in latents[1:]:
        assert float((latents[0] - other).abs().max()) > 1e-3


@pytest.mark.parametrize("family", MIXING)
def test_pictures_of_several_sizes_share_a_step(family: str) -> None:
    states = _denoising(family)
    assert len({state.batch_key for state in states}) == 1
    assert len({tuple(state.latents.shape) for state in states}) > 1


@pytest.mark.parametrize("family", [family for family in PICTURES if family not in MIXING])
def test_pictures_of_other_families_are_grouped_by_size(family: str) -> None:
    assert len({state.batch_key for state in _denoising(family)}) > 1


def _denoising(family: str) -> list[Any]:
    from omni_async.stages.executor import StageRequest

    made = executor(family)
    states = [
        made.admit(StageRequest(request=number, params=ask("a cat", size).params, seed=0))
        for number, size in enumerate(("64x64", "96x64"))
    ]
    for state in states:
        made.step([state])
    return states


def _everything(mask: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(mask)


@pytest.mark.parametrize("family", ["qwen_image", "flux", "stable_diffusion_3"])
def test_without_the_padding_mask_pictures_of_a_mixed_batch_would_be_wrong(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [ask("a cat"), ask("sky", "64x128", seed=1)]
    alone = [run(executor(family), [each])[0] for each in wanted]
    _unmask(family, monkeypatch)
    together = run(executor(family), wanted, staggered=False)
    assert furthest(together, alone) > 1e-3


def _unmask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention see the padding."""
    if family == "stable_diffusion_3":
        init: Callable[..., None] = padding.KeyMask.__init__

        def see_all(self: Any, *masks: torch.Tensor) -> None:
            init(self, *map(_everything, masks))

        monkeypatch.setattr(padding.KeyMask, "__init__", see_all)
        return
    module = __import__(f"omni_async.stages.models.{family}.adapter", fromlist=["pad_stack"])
    stack = module.pad_stack

    def stack_all(rows: Any) -> Any:
        padded, mask = stack(rows)
        return padded, None if mask is None else _everything(mask)

    monkeypatch.setattr(module, "pad_stack", stack_all)
