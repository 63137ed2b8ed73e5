"""Any diffusers pipeline without an adapter: each request is one call of the pipeline.

The call stops after every step, so that requests take turns, progress is told, and a cancelled one ends
at its next step. Nothing is batched.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from omni_async.config import StageConfig
from omni_async.errors import ConfigError, InvalidRequest
from omni_async.stages.diffusion import pictures
from omni_async.stages.diffusion.coroutine import Coroutine
from omni_async.stages.diffusion.loading import load_pipeline
from omni_async.stages.diffusion.options import Options, read_options
from omni_async.stages.diffusion.spec import Spec, parse
from omni_async.stages.executor import Executor, StageRequest, State, StepOutput, StepResult

GIVEN = (
    *("prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "true_cfg_scale", "strength"),
    *("width", "height", "max_sequence_length", "num_frames"),
)
"""Parameters that go to the pipeline under their own names."""


class CallState(State):
    """One call of the pipeline, and how far it is."""

    def __init__(self, request: StageRequest, spec: Spec, steps: int, call: Coroutine) -> None:
        super().__init__(request, has_upstream=False)
        self.spec = spec
        self.steps = steps
        self.call = call
        self.index = 0


class WholeCallExecutor:
    """One pipeline, called once a request."""

    def __init__(self, config: StageConfig, options: Options) -> None:
        self.config = config
        self.options = options

    def load(self) -> None:
        """Load the pipeline."""
        self.pipe: Any = load_pipeline(self.config, self.options)
        self._takes = inspect.signature(self.pipe.__call__).parameters

    def admit(self, request: StageRequest) -> CallState:
        """Raises `InvalidRequest` for a parameter that the pipeline's call does not have."""
        spec = parse(request.params)
        arguments = self._arguments(request, spec)
        for name in arguments:
            if name not in self._takes:
                message = f"{name} is not supported by {type(self.pipe).__name__}."
                raise InvalidRequest(message, param="size" if name in ("width", "height") else name)
        steps = arguments.get("num_inference_steps") or self._takes["num_inference_steps"].default
        return CallState(request, spec, steps, Coroutine(lambda pause: self._call(arguments, pause)))

    def _arguments(self, request: StageRequest, spec: Spec) -> dict[str, Any]:
        arguments: dict[str, Any] = {name: getattr(spec, name) for name in GIVEN if name in request.params}
        if images := pictures.input_images(request.tensors):
            arguments["image"] = images[0]
        if (mask := pictures.input_mask(request.tensors)) is not None:
            arguments["mask_image"] = mask
        generator = torch.Generator("cpu").manual_seed(request.seed)
        return {**arguments, "generator": generator, "output_type": "np"}

    def _call(self, arguments: dict[str, Any], pause: Callable[[], None]) -> Any:
        """Call the pipeline, with a scheduler of the call's own, pausing after each step."""
        pipe = copy.copy(self.pipe)
        pipe.scheduler = copy.deepcopy(self.pipe.scheduler)
        if "callback_on_step_end" in self._takes:
            arguments = {**arguments, "callback_on_step_end": _pausing(pause)}
        else:
            pipe.scheduler.step = _then(pipe.scheduler.step, pause)
        return pipe(**arguments)

    def step(self, states: Sequence[CallState]) -> Sequence[StepResult]:
        """One step of each call, one after the other."""
        return [self._step(state) for state in states]

    def _step(self, state: CallState) -> StepResult:
        try:
            state.call.resume()
        except (ValueError, TypeError) as error:
            # A pipeline checks its inputs before its first step.
            return InvalidRequest(f"{error}") if state.index == 0 else error
        except Exception as error:
            return error
        state.index += 1
        if state.call.done:
            return self._finished(state)
        return [StepOutput(meta=self._progress(state))] if state.spec.progress else []

    @staticmethod
    def _progress(state: CallState) -> dict[str, Any]:
        return {"step": min(state.index, state.steps), "steps": state.steps}

    def _finished(self, state: CallState) -> StepResult:
        result, spec, seed = state.call.result, state.spec, state.request.seed
        if (audio := getattr(result, "audios", None)) is not None:
            return [StepOutput(tensors={"pcm": np.asarray(audio[0], "float32").T}, final=True)]
        if (frames := getattr(result, "frames", None)) is not None:
            film = _bytes(np.asarray(frames[0]))
            if spec.num_frames > 1:
                return [_film(film, spec, seed)]
            return self._picture(state, film[0])
        return self._picture(state, _bytes(np.asarray(result.images[0])))

    def _picture(self, state: CallState, pixels: NDArray[np.uint8]) -> StepResult:
        spec, (height, width) = state.spec, pixels.shape[:2]
        if (width, height) != (spec.width, spec.height):
            wanted = f"{spec.width}x{spec.height}"
            message = f"size {wanted} is not made by this pipeline; the nearest size is {width}x{height}."
            return InvalidRequest(message, param="size", code="unsupported_size")
        meta = {**self._progress(state), "seed": state.request.seed}
        return [StepOutput(tensors={"pixels": pixels}, meta=meta, final=True)]

    def abort(self, state: CallState) -> None:
        """End the call where it stands."""
        state.call.cancel()

    def close(self) -> None:
        """The process ends with the model."""


def _film(frames: NDArray[np.uint8], spec: Spec, seed: int) -> StepOutput:
    return StepOutput(tensors={"frames": frames}, meta={"fps": spec.fps, "seed": seed}, final=True)


def _bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    return pixels if pixels.dtype == np.uint8 else (pixels * 255).round().astype("uint8")


def _pausing(pause: Callable[[], None]) -> Callable[..., dict[str, Any]]:
    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pause()
        return tensors

    return callback


def _then(step: Callable[..., Any], pause: Callable[[], None]) -> Callable[..., Any]:
    def stepped(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        pause()
        return result

    return stepped


def create(config: StageConfig) -> Executor:
    """The executor of a `diffusion` stage. Raises `ConfigError`."""
    options = read_options(config)
    name = "parallelism" if options.world_size > 1 else "cache_backend" if options.cache_backend else ""
    if name:
        raise ConfigError(f"Stage {config.name}: pipelines without an adapter take no {name}.")
    return WholeCallExecutor(config, options)
