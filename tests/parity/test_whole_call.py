"""Pipelines without an adapter: whole calls that take turns, are cancelled at a step, and equal the
library's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from omni_async.config import StageConfig
from omni_async.errors import ConfigError, InvalidRequest
from omni_async.stages.diffusion.whole_call import WholeCallExecutor
from omni_async.stages.executor import StageRequest
from omni_async.stages.registry import create_executor
from tests.stepping import Ask, as_uint8, ask, run
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")


def load(family: str, arch: str = "diffusers", **extras: Any) -> WholeCallExecutor:
    config = StageConfig(
        stage_id=0,
        name="diffusion",
        kind="diffusion",
        final_output=True,
        model=str(tiny_folder(family)),
        model_arch=arch,
        engine_extras=extras,
    )
    executor = create_executor(config)
    assert isinstance(executor, WholeCallExecutor)
    executor.load()
    return executor


def from_stock(family: str, each: Ask) -> Any:
    generator = torch.Generator().manual_seed(each.seed)
    params = {name: value for name, value in each.params.items() if name != "progress"}
    if family == "pixart_sigma":
        params["use_resolution_binning"] = False
    return as_uint8(stock_pipeline(family)(**params, generator=generator, output_type="np").images[0])


@pytest.mark.parametrize("family", ["pixart_sigma", "z_image"])
def test_calls_that_take_turns_equal_the_librarys_own(family: str) -> None:
    wanted = [
        ask("a cat", steps=4, progress=True),
        ask("a dog", steps=6, seed=1, guidance_scale=3.0),
        ask("a bird", steps=3, seed=2),
    ]
    answers = run(load(family), wanted, batch=1)
    for each, answer in zip(wanted, answers, strict=True):
        assert np.array_equal(answer.media, from_stock(family, each))
    told = [output.meta["step"] for output in answers[0].outputs if not output.final]
    assert told == [1, 2, 3, 4]


def test_a_short_call_does_not_wait_for_the_end_of_a_long_one() -> None:
    from omni_async.stages.batcher import Batcher

    executor, batcher, ended = load("z_image"), Batcher("round_robin", 1), []
    for number, steps in enumerate((40, 2)):
        request = StageRequest(request=number, params=ask("a cat", steps=steps).params, seed=0)
        batcher.add(number, executor.admit(request), due=0.0, window=1000)
    while batcher.rows:
        states: list[Any] = [row.state for row in batcher.pick(0.0)]
        (result,) = executor.step(states)
        assert not isinstance(result, Exception)
        if result and result[-1].final:
            ended.append(states[0].request.request)
            batcher.remove(states[0].request.request)
    assert ended == [1, 0]


def test_an_aborted_call_ends_at_its_next_step_and_the_others_go_on() -> None:
    executor = load("z_image")
    requests = [
        StageRequest(request=number, params=ask("a cat", steps=50).params, seed=0) for number in (1, 2)
    ]
    first, second = map(executor.admit, requests)
    executor.step([first])
    executor.step([second])
    executor.abort(first)
    assert first.call.ended and first.index == 1
    executor.step([second])
    assert second.index == 2
    executor.abort(second)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"true_cfg_scale": 3.0}, "true_cfg_scale"),
        ({"lora": {"path": "/x"}}, "lora"),
        ({"partial_images": 2}, "partial_images"),
        ({"strength": 0.5}, "strength"),
    ],
)
def test_what_the_call_does_not_take_is_refused(params: dict[str, Any], param: str) -> None:
    (answer,) = run(load("z_image"), [ask("a cat", **params)])
    assert isinstance(answer.error, InvalidRequest)
    assert answer.error.param == param


def test_a_size_that_the_pipeline_refuses_is_the_callers_fault_and_fails_alone() -> None:
    good, bad = ask("a cat"), ask("a cat", "60x64")
    answers = run(load("z_image"), [good, bad], batch=1)
    assert isinstance(answers[1].error, InvalidRequest)
    assert np.array_equal(answers[0].media, from_stock("z_image", good))


CACHE = {
    "Fn_compute_blocks": 1,
    "Bn_compute_blocks": 0,
    "residual_diff_threshold": 0.9,
    "max_warmup_steps": 2,
}


def test_cache_dit_runs_one_call_after_the_other_each_as_if_alone() -> None:
    executor = load("qwen_image", "qwen_image", cache_backend="cache_dit", cache_config=CACHE)
    wanted = [
        ask("a cat", steps=12, negative_prompt=" "),
        ask("a dog", steps=10, seed=1, negative_prompt=" "),
    ]
    together = [answer.media for answer in run(executor, wanted, batch=1)]
    for one, each in zip(together, wanted, strict=True):
        assert np.array_equal(one, run(executor, [each])[0].media)
        assert not np.array_equal(one, from_stock("qwen_image", each)), "nothing was cached"


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        ({"cache_backend": "first_block"}, "cache_backend cannot be combined"),
        ({"ulysses_degree": 2}, "ulysses_degree cannot be combined"),
        ({"preview_method": "latent"}, "preview_method cannot be combined"),
        ({"cache_backend": "cache_dit", "cache_config": {"Fn_compute": 1}}, "Fn_compute"),
    ],
)
def test_settings_of_steps_are_refused_for_whole_calls(extras: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("z_image", **extras)
    assert reason in str(caught.value)
