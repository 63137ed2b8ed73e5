"""Requests of one diffusion stage beside each other: LoRA adapters, shared encodings, faults, cancels, and
any mix of arrivals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from omni_async.errors import InvalidRequest, Overloaded
from omni_async.stages.batcher import Batcher
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.diffusion.state import DiffusionState
from omni_async.stages.executor import StageRequest, outputs_of
from tests.stepping import Answer, Ask, as_uint8, ask, furthest, guided, load_executor, run
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = ["stable_diffusion_3", "qwen_image"]


@cache
def executor(family: str, *, deterministic: bool = False, **extras: Any) -> DiffusionExecutor:
    return load_executor(tiny_folder(family), family, deterministic=deterministic, **extras)


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Two LoRA folders per family."""
    folders: dict[str, dict[str, str]] = {}
    for family in FAMILIES:
        pipe, root = stock_pipeline(family), tmp_path_factory.mktemp(family)
        targets = ["to_q", "to_k", "to_v"]
        for seed, name in enumerate("ab"):
            torch.manual_seed(seed)
            config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
            pipe.transformer.add_adapter(config, adapter_name=name)
            weights = get_peft_model_state_dict(pipe.transformer, adapter_name=name)
            stronger = {key: 3 * value for key, value in weights.items()}
            type(pipe).save_lora_weights(root / name, transformer_lora_layers=stronger)
        folders[family] = {name: str(root / name) for name in "ab"}
    return folders


def with_lora(family: str, path: str | None, scale: float = 1.0, **more: Any) -> Ask:
    lora = {} if path is None else {"lora": {"path": path, "scale": scale}}
    return ask("a cat", **guided(family, 4.0), **lora, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_a_lora_b_and_none_share_a_batch_and_each_is_as_if_alone(
    family: str, loras: dict[str, dict[str, str]]
) -> None:
    a, b = loras[family]["a"], loras[family]["b"]
    wanted = [
        with_lora(family, a),
        with_lora(family, b, 0.5),
        with_lora(family, None),
        with_lora(family, a, 0.25, size="96x64"),
    ]
    together = run(executor(family), wanted, staggered=False)
    alone = [run(executor(family), [each])[0] for each in wanted]
    exact = run(executor(family, deterministic=True), wanted)
    assert furthest(together, alone) < 1e-4
    for answer, each in zip(exact[:3], wanted, strict=False):
        assert np.array_equal(answer.media, _stock_with_lora(family, each))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert furthest([together[one]], [together[other]]) > 1e-3


def _stock_with_lora(family: str, each: Ask) -> Any:
    pipe, params = stock_pipeline(family), dict(each.params)
    lora = params.pop("lora", None)
    if lora is not None:
        pipe.load_lora_weights(lora["path"], adapter_name="x")
        pipe.set_adapters(["x"], [lora["scale"]])
    if family == "qwen_image":
        params["negative_prompt"] = " "
    generator = torch.Generator().manual_seed(each.seed)
    return as_uint8(pipe(**params, generator=generator, output_type="np").images[0])


def test_adapters_that_nobody_uses_make_room_and_those_in_use_do_not(
    loras: dict[str, dict[str, str]],
) -> None:
    family, paths = "stable_diffusion_3", loras["stable_diffusion_3"]
    made = load_executor(tiny_folder(family), family, max_loras=1)
    first = run(made, [with_lora(family, paths["a"])])[0]
    run(made, [with_lora(family, paths["b"])])
    again = run(made, [with_lora(family, paths["a"])])[0]
    assert furthest([again], [first]) == 0
    both = run(made, [with_lora(family, paths["a"]), with_lora(family, paths["b"])])
    assert both[0].error is None and isinstance(both[1].error, Overloaded)
    assert isinstance(run(made, [with_lora(family, None)])[0].media, np.ndarray)


@pytest.mark.parametrize("kind", ["missing", "no_weights", "another_model"])
def test_a_lora_that_cannot_be_used_is_the_callers_fault_alone(kind: str, tmp_path: Path) -> None:
    paths = {
        "missing": str(tmp_path / "none"),
        "no_weights": str(tmp_path / "bad.safetensors"),
        "another_model": str(tmp_path / "other.safetensors"),
    }
    save_file(
        {
            "transformer.elsewhere.to_q.lora_A.weight": torch.zeros(4, 8),
            "transformer.elsewhere.to_q.lora_B.weight": torch.zeros(8, 4),
        },
        paths["another_model"],
    )
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    family = "stable_diffusion_3"
    good, bad = with_lora(family, None), with_lora(family, paths[kind])
    answers = run(executor(family), [good, bad, good])
    assert isinstance(answers[1].error, InvalidRequest)
    assert (answers[1].error.param or "").startswith("lora")
    assert furthest([answers[0]], [answers[2]]) < 1e-4


def test_n_pictures_of_one_prompt_share_its_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_executor(tiny_folder("stable_diffusion_3"), "stable_diffusion_3")
    encoded: list[str] = []
    encode = made.adapter.encode_texts

    def counted(texts: Sequence[str], state: Any) -> Any:
        encoded.extend(texts)
        return encode(texts, state)

    monkeypatch.setattr(made.adapter, "encode_texts", counted)
    answers = run(made, [ask("one prompt", seed=seed) for seed in range(5)], staggered=True, batch=2)
    assert Counter(encoded) == {"one prompt": 1}
    assert len({answer.media.tobytes() for answer in answers}) == 5


def test_a_step_encodes_all_new_prompts_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_executor(tiny_folder("stable_diffusion_3"), "stable_diffusion_3")
    calls: list[int] = []
    encode = made.adapter.encode_texts
    monkeypatch.setattr(
        made.adapter, "encode_texts", lambda texts, state: calls.append(len(texts)) or encode(texts, state)
    )
    run(made, [ask(f"prompt {number}") for number in range(4)], staggered=False)
    assert calls == [4]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_that_fails_in_a_running_batch_leaves_the_others_as_they_were(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = load_executor(tiny_folder("stable_diffusion_3"), "stable_diffusion_3", deterministic=deterministic)
    good = [ask("a cat", steps=6), ask("a dog", steps=5, seed=1)]
    before = run(made, good)
    step = made.adapter.step_scheduler

    def fails_for_one(state: Any, prediction: Any) -> None:
        if state.spec.prompt == "poison" and state.index == 2:
            raise RuntimeError("a fault of this row")
        step(state, prediction)

    monkeypatch.setattr(made.adapter, "step_scheduler", fails_for_one)
    invalid = ask("x", negative_prompt="y", guidance_scale=1.0)
    answers = run(made, [good[0], ask("poison", seed=9), invalid, good[1]])
    assert isinstance(answers[1].error, RuntimeError)
    assert isinstance(answers[2].error, InvalidRequest)
    after = [answers[0], answers[3]]
    if deterministic:
        assert all(np.array_equal(one.media, other.media) for one, other in zip(before, after, strict=True))
    assert furthest(after, before) < 1e-4


def test_latents_that_are_not_finite_fail_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_executor(tiny_folder("stable_diffusion_3"), "stable_diffusion_3")
    step = made.adapter.step_scheduler

    def overflows_for_one(state: Any, prediction: Any) -> None:
        step(state, prediction * float("nan") if state.spec.prompt == "poison" else prediction)

    monkeypatch.setattr(made.adapter, "step_scheduler", overflows_for_one)
    answers = run(made, [ask("a cat"), ask("poison")], staggered=False)
    assert answers[0].error is None
    assert "not finite" in str(answers[1].error)


@pytest.mark.parametrize("method", ["vae", "latent"])
def test_previews_come_as_often_as_asked_and_approach_the_picture(method: str) -> None:
    made = load_executor(tiny_folder("flux"), "flux", preview_method=method)
    (answer,) = run(made, [ask("a cat", steps=12, partial_images=3, progress=True, upscale_to=[128, 128])])
    partial = [output for output in answer.outputs if "partial" in output.meta]
    assert [output.meta["partial"] for output in partial] == [0, 1, 2]
    assert [output.meta["step"] for output in partial] == [3, 6, 9]
    assert all(output.tensors["pixels"].shape == (128, 128, 3) for output in partial)
    told = [output.meta["step"] for output in answer.outputs if not output.tensors]
    assert told == [1, 2, 4, 5, 7, 8, 10, 11, 12]
    final = answer.outputs[-1]
    assert final.meta["upscaled_from"] == [64, 64]
    errors = [np.abs(o.tensors["pixels"].astype(int) - final.tensors["pixels"]).mean() for o in partial]
    assert errors[2] < errors[0]


def test_a_group_of_another_size_does_not_wait_for_the_end_of_the_first() -> None:
    made, batcher, ended = executor("stable_diffusion_xl"), Batcher("round_robin", 8), []
    for number, each in enumerate([ask("a cat", steps=30), ask("a dog", "96x64", steps=3)]):
        request = StageRequest(request=number, params=each.params, seed=0)
        batcher.add(number, made.admit(request), due=0.0, window=1000)
    steps = 0
    while batcher.rows:
        states: list[Any] = [row.state for row in batcher.pick(0.0)]
        steps += 1
        for state, result in zip(states, made.step(states), strict=True):
            if any(output.final for output in outputs_of(result)):
                ended.append((state.request.request, steps))
                batcher.remove(state.request.request)
    assert ended[0][0] == 1
    assert ended[0][1] <= 1 + 2 * (3 + 1)


SIZES = ["64x64", "96x64", "32x48", "64x128"]


@cache
def _alone(family: str, prompt: str, size: str, steps: int, seed: int) -> Answer:
    return run(executor(family), [ask(prompt, size, steps, seed)])[0]


Arrival = tuple[int, str, str, int, int, int | None]
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.sampled_from(["a cat", "a much longer prompt about many dogs"]),
        st.sampled_from(SIZES),
        st.sampled_from([2, 3, 5]),
        st.integers(0, 2),
        st.one_of(st.none(), st.none(), st.integers(0, 8)),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("family", FAMILIES)
@given(arrivals=ARRIVALS, batch=st.sampled_from([1, 2, 8]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_any_mix_of_arrivals_sizes_steps_and_cancels_gives_everyone_its_solo_picture(
    family: str, arrivals: list[Arrival], batch: int
) -> None:
    made, batcher, answers = executor(family), Batcher("round_robin", batch), dict[int, Answer]()
    turn = 0
    while turn <= max(arrival[0] for arrival in arrivals) or batcher.rows:
        for number, (at, prompt, size, steps, seed, leaves) in enumerate(arrivals):
            if at == turn:
                each = ask(prompt, size, steps, seed)
                state = made.admit(StageRequest(request=number, params=each.params, seed=seed))
                batcher.add(number, state, due=0.0, window=1000)
            if leaves is not None and at + leaves == turn and (row := batcher.remove(number)) is not None:
                assert isinstance(row.state, DiffusionState)
                made.abort(row.state)
        states: list[Any] = [row.state for row in batcher.pick(0.0)]
        for state, result in zip(states, made.step(states) if states else (), strict=True):
            if outputs := outputs_of(result):
                answers[state.request.request] = Answer(state.latents, outputs)
                batcher.remove(state.request.request)
        turn += 1
    for number, (_, prompt, size, steps, seed, leaves) in enumerate(arrivals):
        if number in answers:
            assert furthest([answers[number]], [_alone(family, prompt, size, steps, seed)]) < 1e-4
        else:
            assert leaves is not None
