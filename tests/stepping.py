"""Diffusion executors driven without a worker: many requests, each joining at a step of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_async.config import StageConfig
from omni_async.stages.batcher import Batcher
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.executor import Executor, StageRequest, State, StepOutput, StepResult
from omni_async.stages.registry import create_executor


@dataclass(frozen=True)
class Ask:
    """One request."""

    params: Mapping[str, Any]
    seed: int = 0
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass
class Answer:
    """What became of it: the last latents, what was put out, and the final media."""

    latents: Any = None
    outputs: list[StepOutput] = field(default_factory=list)
    error: Exception | None = None

    @property
    def media(self) -> NDArray[Any]:
        """Pixels, frames or pcm of the final output."""
        assert self.error is None, self.error
        (array,) = self.outputs[-1].tensors.values()
        return array


def ask(prompt: str, size: str = "64x64", steps: int = 4, seed: int = 0, **params: Any) -> Ask:
    """A request for a picture."""
    width, height = map(int, size.split("x"))
    shape = {"width": width, "height": height, "num_inference_steps": steps}
    return Ask({"prompt": prompt, **shape, **params}, seed)


def guided(family: str, scale: float) -> dict[str, Any]:
    """The parameter that weighs the negative prompt."""
    true_cfg = family in ("qwen_image", "qwen_image_edit")
    return {"true_cfg_scale" if true_cfg else "guidance_scale": scale}


def load_executor(
    folder: Path, family: str, *, deterministic: bool = False, **extras: Any
) -> DiffusionExecutor:
    """The executor of a `diffusion` stage over a diffusers folder."""
    config = StageConfig(
        stage_id=0,
        name="diffusion",
        kind="diffusion",
        final_output=True,
        model=str(folder),
        model_arch=family,
        deterministic=deterministic,
        engine_extras=extras,
    )
    executor = create_executor(config)
    assert isinstance(executor, DiffusionExecutor)
    executor.load()
    return executor


def run(executor: Executor, asks: Sequence[Ask], *, staggered: bool = True, batch: int = 8) -> list[Answer]:
    """All requests to their ends under the worker's own batcher; `staggered` ones join a step apart."""
    batcher, answers = Batcher("round_robin", batch), [Answer() for _ in asks]
    waiting = list(enumerate(asks))
    while waiting or batcher.rows:
        for number, each in [waiting.pop(0) for _ in range(1 if staggered else len(waiting)) if waiting]:
            request = StageRequest(request=number, params=each.params, seed=each.seed, tensors=each.tensors)
            try:
                batcher.add(number, executor.admit(request), due=0.0, window=10_000)
            except Exception as error:
                answers[number].error = error
        states: list[Any] = [row.state for row in batcher.pick(0.0)]
        for state, result in zip(states, executor.step(states) if states else (), strict=True):
            _take(batcher, state, result, answers[state.request.request])
    return answers


def _take(batcher: Batcher, state: State, result: StepResult, answer: Answer) -> None:
    answer.latents = getattr(state, "latents", None)
    if isinstance(result, Exception):
        answer.error = result
        batcher.remove(state.request.request)
        return
    answer.outputs += result
    if result and result[-1].final:
        batcher.remove(state.request.request)


def furthest(some: Sequence[Answer], others: Sequence[Answer]) -> float:
    """The largest difference between latents of the same request, at latents' usual scale of 1."""
    pairs = [(one.latents, other.latents) for one, other in zip(some, others, strict=True)]
    return max(float((one - other).abs().max() / max(1.0, float(other.std()))) for one, other in pairs)


def as_uint8(picture: NDArray[Any]) -> NDArray[np.uint8]:
    """A pipeline's `output_type="np"` as the bytes that PIL would have."""
    return (picture * 255).round().astype("uint8")
