"""The built-in picture model: it draws what was asked for, and its recipe still makes such a folder."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from numpy.typing import NDArray
from safetensors.numpy import save_file

from examples.train_pictor import check, export, train
from omni_async import deploy
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.registry import create_executor
from tests.pictor_things import NAMES, nearest
from tests.stepping import Ask, run

pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def executor() -> tuple[DiffusionExecutor, dict[str, Any]]:
    """The stage as `omni-async serve` configures it, and its defaults."""
    (stage,) = deploy.load(model="pictor").pipelines[0].stages
    made = create_executor(stage)
    assert isinstance(made, DiffusionExecutor)
    made.load()
    return made, stage.default_sampling_params


def draw(prompts: list[str]) -> list[NDArray[np.uint8]]:
    """Through the stage, eight at a time and a step apart."""
    made, defaults = executor()
    asks = [Ask({**defaults, "prompt": prompt}, seed) for seed, prompt in enumerate(prompts)]
    return [answer.media for answer in run(made, asks)]


def test_all_207_things_are_recognised_among_984_pictures() -> None:
    found = nearest(draw(NAMES))
    wrong = [name for index, name in enumerate(NAMES) if found[index] != index]
    assert len(NAMES) == 207
    assert not wrong


def test_the_check_can_fail() -> None:
    pictures = draw(NAMES[:8])
    assert nearest(pictures[::-1]) == list(range(8))[::-1]
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    assert nearest([noise]) != [0]


def test_phrasings_of_a_thing_are_the_thing() -> None:
    phrasings = ["A photo of a red apple", "please draw me a picture of the red apple", "Red Apple!"]
    assert set(nearest(draw(phrasings))) == {NAMES.index("red apple")}


def test_an_image_is_changed_towards_the_prompt() -> None:
    made, defaults = executor()
    begin = draw(["red apple"])[0]
    mask = np.zeros((128, 128), np.uint8)
    mask[:, 64:] = 255
    params = {**defaults, "prompt": "green apple", "strength": 0.9}
    changed, masked = run(
        made, [Ask(params, 1, {"image0": begin}), Ask(params, 1, {"image0": begin, "mask": mask})]
    )
    assert NAMES[nearest([changed.media])[0]] == "green apple"
    difference = np.abs(masked.media.astype(int) - begin).mean((0, 2))
    assert difference[:56].mean() < 10 < difference[72:].mean()


def _some_pictures(folder: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (len(NAMES[:6]), 1, 1, 3), dtype=np.uint8)
    save_file(
        {"pictures": np.ascontiguousarray(np.broadcast_to(colours, (6, 32, 32, 3)))},
        folder / "pictures.safetensors",
    )
    names = [{"label": name, "tags": ["thing", "round"]} for name in NAMES[:6]]
    (folder / "names.json").write_text(json.dumps(names))


def test_the_recipe_makes_a_folder_that_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _some_pictures(tmp_path)
    data, run_dir, weights = str(tmp_path), str(tmp_path / "run"), str(tmp_path / "weights")
    steps = {
        train.main: ["--data", data, "--output", run_dir, "--steps", "40", "--layers", "1"],
        export.main: ["--data", data, "--run", run_dir, "--output", weights, "--layers", "1"],
        check.main: ["--data", data, "--weights", weights, "--steps", "2"],
    }
    for main, arguments in steps.items():
        monkeypatch.setattr(sys, "argv", ["x", *arguments])
        main()
    told = capsys.readouterr().out
    first, last = (float(word) for word in told.split("loss ")[1].splitlines()[0].split(" → "))
    assert last < first
    assert "of 6 are nearest" in told
    pipe: Any = StableDiffusion3Pipeline.from_pretrained(weights, dtype=torch.float32)
    assert pipe("red apple", num_inference_steps=2).images[0].size == (128, 128)
