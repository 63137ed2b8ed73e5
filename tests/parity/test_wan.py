"""Wan beside the library's own pipeline: films of several lengths among pictures, both experts of Wan 2.2,
and its timesteps by token."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from numpy.typing import NDArray

from omni_async.errors import ConfigError, InvalidRequest
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.executor import StageRequest
from tests.stepping import Ask, as_uint8, ask, furthest, load_executor, run
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = ["one", "experts", "tokens"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One network, as Wan 2.1; two, as Wan 2.2; one that takes a time of each token, as its 5B model."""
    parts = stock_pipeline("wan").components
    parts = {name: part for name, part in parts.items() if name != "transformer_2"}
    torch.manual_seed(1)
    late: Any = WanTransformer3DModel.from_config(parts["transformer"].config)
    found = {"one": tiny_folder("wan"), **{kind: tmp_path_factory.mktemp(kind) for kind in KINDS[1:]}}
    WanPipeline(**parts, transformer_2=late, boundary_ratio=0.875).save_pretrained(found["experts"])
    WanPipeline(**parts, expand_timesteps=True).save_pretrained(found["tokens"])
    return found


@cache
def executor(folder: Path, *, deterministic: bool = False) -> DiffusionExecutor:
    return load_executor(folder, "wan", deterministic=deterministic)


@cache
def stock(folder: Path) -> Any:
    pipe = WanPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def from_stock(folder: Path, each: Ask) -> NDArray[np.uint8]:
    """uint8 `[frames, height, width, 3]`, a picture without the frames' dimension."""
    params: dict[str, Any] = {"num_frames": 1, **each.params}
    generator = torch.Generator().manual_seed(each.seed)
    frames = as_uint8(stock(folder)(**params, generator=generator, output_type="np").frames[0])
    return frames[0] if params["num_frames"] == 1 else frames


ASKS = [
    ask("a film", steps=5, num_frames=5, guidance_scale=4.0),
    ask("a long film about dogs", steps=4, seed=1, num_frames=9, guidance_scale=1.0),
    ask("a cat", steps=6, seed=2, guidance_scale=6.0, negative_prompt="bad"),
    ask("sky", "96x64", steps=3, seed=3, num_frames=5, guidance_scale=2.0),
    ask("sea", steps=4, seed=4, num_frames=5, guidance_scale=1.0),
]


@pytest.mark.parametrize("kind", KINDS)
def test_films_and_pictures_equal_the_library_bit_for_bit(kind: str, folders: dict[str, Path]) -> None:
    for each, answer in zip(ASKS, run(executor(folders[kind], deterministic=True), ASKS), strict=True):
        theirs = from_stock(folders[kind], each)
        assert np.array_equal(answer.media, theirs), each.params
        assert theirs.std() > 1


@pytest.mark.parametrize("kind", KINDS)
def test_films_that_join_a_running_batch_are_as_if_alone(kind: str, folders: dict[str, Path]) -> None:
    made = executor(folders[kind])
    together, alone = run(made, ASKS), [run(made, [each])[0] for each in ASKS]
    assert furthest(together, alone) < 1e-4
    for one, other in zip(together, alone, strict=True):
        assert np.abs(one.media.astype(int) - other.media).max() <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_seed_guidance_and_length_each_change_the_film(kind: str, folders: dict[str, Path]) -> None:
    first = ASKS[0]
    others = [
        Ask({**first.params, "prompt": "an entirely different thing"}, first.seed),
        Ask(first.params, first.seed + 1),
        Ask({**first.params, "guidance_scale": 9.0}, first.seed),
        Ask({**first.params, "num_frames": 9}, first.seed),
    ]
    latents = [answer.latents for answer in run(executor(folders[kind]), [first, *others])]
    for other in latents[1:]:
        assert float((latents[0] - other[:, :, :2]).abs().max()) > 1e-3


def test_requests_share_a_step_while_they_are_with_the_same_expert(folders: dict[str, Path]) -> None:
    made = executor(folders["experts"])
    early, late = (
        made.admit(StageRequest(request=number, params=ask("a cat", steps=4).params, seed=number))
        for number in range(2)
    )
    for state in (early, late):
        made.step([state])
    assert early.batch_key == late.batch_key
    while late.timestep >= 875:
        assert late.batch_key == early.batch_key
        made.step([late])
    assert early.batch_key != late.batch_key


def test_the_late_expert_takes_part(folders: dict[str, Path]) -> None:
    one, two = (run(executor(folders[kind]), ASKS[:1]) for kind in ("one", "experts"))
    assert furthest(one, two) > 1e-3


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"num_frames": 4}, "num_frames"),
        ({"num_frames": 0}, "num_frames"),
        ({"num_frames": -3}, "num_frames"),
        ({"num_frames": 5, "partial_images": 1}, "partial_images"),
        ({"size": "72x64"}, "size"),
        ({"negative_prompt": "bad", "guidance_scale": 1.0}, "negative_prompt"),
    ],
)
def test_what_cannot_be_made_is_refused(params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        executor(tiny_folder("wan")).admit(StageRequest(request=1, params=ask("x", **params).params, seed=0))
    assert refused.value.param == param


def test_a_lora_of_one_expert_is_refused(folders: dict[str, Path]) -> None:
    params = ask("x", lora={"path": "/nowhere"}).params
    with pytest.raises(InvalidRequest) as refused:
        executor(folders["experts"]).admit(StageRequest(request=1, params=params, seed=0))
    assert refused.value.param == "lora"


def test_experts_without_a_boundary_between_them_end_the_start(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    stock(folders["experts"]).save_pretrained(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text().replace('"boundary_ratio": 0.875', '"boundary_ratio": null'))
    with pytest.raises(ConfigError, match="boundary"):
        executor(tmp_path)


def test_options_of_the_network_are_of_both_experts(folders: dict[str, Path]) -> None:
    made = load_executor(folders["experts"], "wan", quantization="fp8_layerwise")
    for network in made.adapter.networks:
        assert torch.float8_e4m3fn in {each.dtype for each in network.parameters()}
    assert len(made.adapter.networks) == 2
    with pytest.raises(ConfigError, match="several networks"):
        load_executor(folders["experts"], "wan", cache_backend="first_block", cache_config={"threshold": 0.1})
