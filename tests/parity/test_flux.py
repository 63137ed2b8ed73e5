"""FLUX.1 as it is served, with guidance embedded and without, beside the library's own pipeline."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from numpy.typing import NDArray

from omni_async import deploy
from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.executor import StageRequest
from omni_async.stages.registry import create_executor
from tests.stepping import Ask, as_uint8, ask, furthest, load_executor, run
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny FLUX without embedded guidance, as FLUX.1 schnell has none."""
    folder, pipe = tmp_path_factory.mktemp("schnell"), stock_pipeline("flux")
    whole = pipe.transformer
    network: Any = FluxTransformer2DModel.from_config({**whole.config, "guidance_embeds": False})
    missing, _ = network.load_state_dict(whole.state_dict(), strict=False)
    assert not missing
    pipe.transformer = network
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(params=["dev", "schnell"])
def folder(request: pytest.FixtureRequest, schnell: Path) -> Path:
    return schnell if request.param == "schnell" else tiny_folder("flux")


@cache
def stock(folder: Path) -> Any:
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def from_stock(folder: Path, each: Ask, **more: Any) -> NDArray[np.uint8]:
    generator = torch.Generator().manual_seed(each.seed)
    made = stock(folder)(**each.params, **more, output_type="np", generator=generator)
    return as_uint8(made.images[0])


@cache
def executor(folder: Path) -> DiffusionExecutor:
    return load_executor(folder, "flux", deterministic=True)


def served(folder: Path) -> Any:
    """The executor and the parameters that `omni-async serve FOLDER` has."""
    (stage,) = deploy.load(model=str(folder)).pipelines[0].stages
    made = create_executor(stage)
    made.load()
    return made, stage.default_sampling_params


def test_a_served_checkpoint_draws_what_the_pipelines_own_defaults_draw(folder: Path) -> None:
    made, defaults = served(folder)
    assert defaults["num_inference_steps"] == 28
    wanted = ask("a cat", steps=3, seed=5)
    (answer,) = run(made, [Ask({**defaults, **wanted.params}, wanted.seed)])
    assert np.array_equal(answer.media, from_stock(folder, wanted))


def test_a_checkpoint_without_embedded_guidance_equals_the_library_bit_for_bit(schnell: Path) -> None:
    wanted = [
        ask("a cat"),
        ask("a long prompt about dogs", steps=6, seed=1, negative_prompt="cats", true_cfg_scale=3.0),
        ask("a boat", "96x64", steps=3, seed=2, negative_prompt="", true_cfg_scale=1.5),
    ]
    for each, answer in zip(wanted, run(executor(schnell), wanted), strict=True):
        assert np.array_equal(answer.media, from_stock(schnell, each)), each.params


def test_guided_and_unguided_rows_of_several_sizes_get_what_they_would_get_alone(schnell: Path) -> None:
    made = load_executor(schnell, "flux")
    wanted = [
        ask("a cat", "32x96", steps=5),
        ask("sky", steps=4, seed=1, negative_prompt="sea", true_cfg_scale=4.0),
        ask("a boat", "96x64", steps=3, seed=2, true_cfg_scale=2.0),
    ]
    together, alone = run(made, wanted), [run(made, [each])[0] for each in wanted]
    assert furthest(together, alone) < 1e-4
    for one, other in zip(together, alone, strict=True):
        assert np.abs(one.media.astype(int) - other.media).max() <= 1


def test_true_cfg_scale_alone_guides_away_from_the_empty_prompt() -> None:
    wanted = ask("a cat", true_cfg_scale=4.0, guidance_scale=2.0)
    (guided,) = run(executor(tiny_folder("flux")), [wanted])
    assert np.array_equal(guided.media, from_stock(tiny_folder("flux"), wanted, negative_prompt=""))
    (plain,) = run(executor(tiny_folder("flux")), [ask("a cat", guidance_scale=2.0)])
    assert not np.array_equal(guided.media, plain.media)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"guidance_scale": 3.5}, "guidance_scale"),
        ({"negative_prompt": "bad"}, "negative_prompt"),
        ({"negative_prompt": "bad", "true_cfg_scale": 1.0}, "negative_prompt"),
        ({"size": "72x64"}, "size"),
    ],
)
def test_what_would_have_no_effect_is_refused(schnell: Path, params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        executor(schnell).admit(StageRequest(request=1, params=ask("a cat", **params).params, seed=0))
    assert refused.value.param == param
