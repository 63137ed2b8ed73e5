"""What libraries add, beside their own use of it on the stock pipeline; and what cannot be combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from numpy.typing import NDArray

from omni_async.errors import ConfigError, InvalidRequest
from omni_async.stages.diffusion.executor import DiffusionExecutor
from tests.stepping import Ask, as_uint8, ask, guided, load_executor, run
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")

SCALE = {"qwen_image": "true_cfg_scale"}


def load(family: str, **extras: Any) -> DiffusionExecutor:
    return load_executor(tiny_folder(family), family, deterministic=True, **extras)


def request(family: str, steps: int = 4, seed: int = 0) -> Ask:
    return ask("a cat", steps=steps, seed=seed, **guided(family, 4.0))


def drawn(executor: DiffusionExecutor, *asks: Ask) -> list[NDArray[np.uint8]]:
    return [answer.media for answer in run(executor, asks)]


def stock(family: str, change: Callable[[Any], None], steps: int = 4) -> NDArray[np.uint8]:
    """The library's pipeline, changed by the library's own means."""
    pipe = stock_pipeline(family)
    change(pipe)
    extra = {"negative_prompt": " "} if family in SCALE else {}
    params = {**request(family, steps).params, **extra}
    made = pipe(**params, generator=torch.Generator().manual_seed(0), output_type="np").images[0]
    return as_uint8(made)


@pytest.fixture(scope="module")
def plain() -> dict[str, NDArray[np.uint8]]:
    """What is drawn without any option."""
    return {
        name: drawn(load(name), request(name))[0] for name in ("flux", "qwen_image", "stable_diffusion_3")
    }


def _int8(pipe: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(pipe.transformer, Int8WeightOnlyConfig())


def _fp8(pipe: Any) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(pipe.transformer, Float8WeightOnlyConfig())


def _layerwise(pipe: Any) -> None:
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


@pytest.mark.parametrize(("kind", "change"), [("int8", _int8), ("fp8", _fp8), ("fp8_layerwise", _layerwise)])
@pytest.mark.parametrize("family", ["flux", "stable_diffusion_3"])
def test_quantized_weights_draw_what_the_library_draws_with_them(
    family: str, kind: str, change: Callable[[Any], None], plain: dict[str, NDArray[np.uint8]]
) -> None:
    (ours,) = drawn(load(family, quantization=kind), request(family))
    assert np.array_equal(ours, stock(family, change))
    assert not np.array_equal(ours, plain[family])


def test_layers_that_wait_in_memory_draw_the_same(plain: dict[str, NDArray[np.uint8]]) -> None:
    executor = load("flux", enable_layerwise_offload=True)
    assert any("group_offloading" in m._diffusers_hook.hooks for m in _hooked(executor))
    assert np.array_equal(drawn(executor, request("flux"))[0], plain["flux"])


def _hooked(executor: DiffusionExecutor) -> list[Any]:
    return [m for m in executor.adapter.transformer.modules() if hasattr(m, "_diffusers_hook")]


def _slice(pipe: Any) -> None:
    pipe.vae.enable_slicing()


def _tile(pipe: Any) -> None:
    pipe.vae.enable_tiling()


@pytest.mark.parametrize(("option", "change"), [("vae_use_slicing", _slice), ("vae_use_tiling", _tile)])
def test_the_vae_works_in_parts_as_the_librarys_does(option: str, change: Callable[[Any], None]) -> None:
    executor = load("flux", **{option: True})
    vae = executor.adapter.pipe.vae
    assert vae.use_slicing if option == "vae_use_slicing" else vae.use_tiling
    assert np.array_equal(drawn(executor, request("flux"))[0], stock("flux", change))


def test_the_components_run_where_they_are_told_to(plain: dict[str, NDArray[np.uint8]]) -> None:
    executor = load("flux", component_devices={"vae": "cpu", "text_encoder": "cpu"})
    assert np.array_equal(drawn(executor, request("flux"))[0], plain["flux"])


@pytest.mark.parametrize("setting", [{"diffusion_attention_backend": "_native_math"}])
def test_another_attention_backend_computes_the_same_otherwise(
    setting: dict[str, Any], plain: dict[str, NDArray[np.uint8]]
) -> None:
    executor = load("flux", **setting)
    backends = {
        module.processor._attention_backend.value
        for module in executor.adapter.transformer.modules()
        if hasattr(getattr(module, "processor", None), "_attention_backend")
    }
    assert backends == {"_native_math"}
    assert _AttentionBackendRegistry.get_active_backend()[0] == "native", "others keep theirs"
    difference = drawn(executor, request("flux"))[0].astype(int) - plain["flux"]
    assert np.abs(difference).max() <= 1


def test_attention_of_one_role_can_have_a_backend_of_its_own() -> None:
    executor = load("flux", attention_backends={"self": "_native_math"})
    chosen = [
        (module.added_kv_proj_dim is not None, module.processor._attention_backend)
        for module in executor.adapter.transformer.modules()
        if hasattr(getattr(module, "processor", None), "_attention_backend")
    ]
    assert {backend is None for joint, backend in chosen if joint} == {True}
    assert {backend is None for joint, backend in chosen if not joint} == {False}


def test_a_compiled_network_draws_the_same(plain: dict[str, NDArray[np.uint8]]) -> None:
    executor = load("stable_diffusion_3", enforce_eager=False)
    assert executor.adapter.transformer._compiled_call_impl is not None
    difference = drawn(executor, request("stable_diffusion_3"))[0].astype(int) - plain["stable_diffusion_3"]
    assert np.abs(difference).max() <= 1


CACHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "first_block": ({"threshold": 0.5}, {"threshold": 0.0}),
    "taylorseer": (
        {"cache_interval": 3, "disable_cache_before_step": 2, "max_order": 1},
        {"cache_interval": 1, "disable_cache_before_step": 2, "max_order": 1},
    ),
}


@pytest.mark.parametrize("family", ["flux", "qwen_image"])
@pytest.mark.parametrize("backend", CACHES)
def test_cached_requests_that_take_turns_do_not_see_each_others_cache(family: str, backend: str) -> None:
    settings, _ = CACHES[backend]
    executor = load(family, cache_backend=backend, cache_config=settings)
    wanted = [request(family, 8), request(family, 10, 1), request(family, 6, 2)]
    together = drawn(executor, *wanted)
    for one, each in zip(together, wanted, strict=True):
        assert np.array_equal(one, drawn(executor, each)[0])
    assert executor.adapter.cache is not None
    assert not executor.adapter.cache.kept


@pytest.mark.parametrize("backend", CACHES)
def test_a_cache_saves_work_unless_it_is_told_to_skip_nothing(backend: str) -> None:
    skipping, whole = CACHES[backend]
    calls: dict[str, int] = {}
    pictures: dict[str, NDArray[np.uint8]] = {}
    for name, settings in (("skipping", skipping), ("whole", whole)):
        executor = load("flux", cache_backend=backend, cache_config=settings)
        block, count = executor.adapter.transformer.single_transformer_blocks[-1], [0]
        block.attn.to_q.register_forward_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        (pictures[name],) = drawn(executor, request("flux", 10))
        calls[name] = count[0]
    assert calls["skipping"] < calls["whole"]
    assert np.array_equal(pictures["whole"], drawn(load("flux"), request("flux", 10))[0])
    assert not np.array_equal(pictures["skipping"], pictures["whole"])


def test_an_aborted_request_leaves_nothing_in_the_cache() -> None:
    from omni_async.stages.executor import StageRequest

    executor = load("flux", cache_backend="first_block", cache_config={"threshold": 0.5})
    state = executor.admit(StageRequest(request=7, params=request("flux", 8).params, seed=0))
    for _ in range(4):
        executor.step([state])
    assert executor.adapter.cache is not None
    assert executor.adapter.cache.kept == {"7:cond"}
    executor.abort(state)
    assert not executor.adapter.cache.kept


def test_a_cache_for_a_number_of_steps_refuses_others() -> None:
    settings = {"threshold": 0.3, "num_inference_steps": 4, "mag_ratios": [1.0] * 4}
    executor = load("flux", cache_backend="magcache", cache_config=settings)
    (answer,) = run(executor, [request("flux", 6)])
    assert isinstance(answer.error, InvalidRequest) and answer.error.param == "num_inference_steps"
    assert run(executor, [request("flux", 4)])[0].media.std() > 1


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("stable_diffusion_3", {"cache_backend": "first_block"}, "no caches"),
    ("z_image", {"cache_backend": "first_block"}, "no caches"),
    ("stable_diffusion_3", {"diffusion_attention_backend": "native"}, "no choice of backend"),
    ("flux", {"diffusion_attention_backend": "flush"}, "must be one of"),
    ("flux", {"attention_backends": {"cross": "native"}}, "joint, self"),
    ("flux", {"enable_cpu_offload": True}, "needs an accelerator"),
    ("flux", {"component_devices": {"vea": "cpu"}}, "text_encoder"),
    ("flux", {"component_devices": {"vae": "cuda:7"}}, "no device of this machine"),
    ("flux", {"component_devices": {"transformer": "cpu"}}, "where the stage does"),
    ("flux", {"enable_layerwise_offload": True, "component_devices": {"vae": "cpu"}}, "choose one"),
    ("flux", {"quantization": "int8", "enable_layerwise_offload": True}, "cannot be moved"),
    ("flux", {"enforce_eager": False, "cache_backend": "first_block"}, "cannot be combined"),
    ("flux", {"cache_config": {"threshold": 0.1}}, "no effect"),
    ("flux", {"cache_backend": "first_block", "cache_config": {"treshold": 0.1}}, "treshold"),
    ("flux", {"cfg_parallel_size": 2}, "only 1"),
    ("flux", {"vae_use_tilling": True}, "did you mean vae_use_tiling"),
    ("flux", {"quantization": "int4"}, "Invalid enum value"),
]


@pytest.mark.parametrize(("family", "extras", "reason"), REFUSED)
def test_what_cannot_be_had_is_refused_when_the_stage_starts(
    family: str, extras: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(family, **extras)
    assert reason in str(caught.value)


def test_quantized_weights_take_no_lora() -> None:
    executor = load("flux", quantization="int8")
    wanted = request("flux")
    (answer,) = run(executor, [Ask({**wanted.params, "lora": {"path": "/nowhere"}})])
    assert isinstance(answer.error, InvalidRequest) and answer.error.param == "lora"
