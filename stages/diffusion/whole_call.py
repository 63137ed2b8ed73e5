"""A diffusers pipeline without an adapter: each request is one call of the pipeline.

The call stops after every step, so that requests take turns, progress is told, and a cancelled one ends
at its next step. Nothing is batched. With cache-dit, whose state belongs to one call at a time,
each call is run to its end before the next.
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
from omni_async.stages.diffusion.loading import load_components, load_pipeline
from omni_async.stages.diffusion.options import Options, refuse_all_but
from omni_async.stages.diffusion.spec import Spec, parse
from omni_async.stages.executor import StageRequest, State, StepOutput, StepResult

GIVEN = (
    *("prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "true_cfg_scale", "strength"),
    *("width", "height", "max_sequence_length", "num_frames", "audio_start_in_s"),
)
"""Parameters that go to the pipeline under their own names."""
OURS = ("progress", "upscale_to", "fps", "seconds")


class CallState(State):
    """One call of the pipeline, and how far it is."""

    def __init__(
        self, request: StageRequest, spec: Spec, steps: int, call: Coroutine, may_run: Callable[[int], bool]
    ) -> None:
        super().__init__(request, has_upstream=False)
        self.spec = spec
        self._may_run = may_run
        self.steps = steps
        self.call = call
        self.index = 0

    @property
    def ready(self) -> bool:
        """Not while another call has the pipeline for itself."""
        return self._may_run(self.request.request)


class WholeCallExecutor:
    """One pipeline, called once a request."""

    def __init__(self, config: StageConfig, options: Options) -> None:
        self.config = config
        self.options = options
        self._has_pipe: int | None = None

    def load(self) -> None:
        """Load the pipeline. Raises `ConfigError`."""
        cached = self.options.cache_backend == "cache_dit"
        allowed = ("cache_backend", "cache_config") if cached else ()
        refuse_all_but(allowed, self.options, self.config, "whole calls of a pipeline")
        components = load_components(self.config)
        self.pipe: Any = load_pipeline(self.config, self.options, **components)
        if self.options.cache_backend == "cache_dit":
            _enable_cache_dit(self.pipe, self.options.cache_config)
        self._takes = inspect.signature(self.pipe.__call__).parameters

    def _may_run(self, request: int) -> bool:
        return self._has_pipe in (None, request) or self.options.cache_backend is None

    def admit(self, request: StageRequest) -> CallState:
        """Raises `InvalidRequest` for a parameter that the pipeline's call does not have."""
        spec = parse(request.params)
        arguments = self._arguments(request, spec)
        others = [name for name in request.params if name not in (*GIVEN, *OURS)]
        for name in (*arguments, *others):
            if name not in self._takes:
                message = f"{name} is not supported by {type(self.pipe).__name__}."
                raise InvalidRequest(message, param="size" if name in ("width", "height") else name)
        steps = arguments.get("num_inference_steps") or self._takes["num_inference_steps"].default
        call = Coroutine(lambda pause: self._call(arguments, pause))
        return CallState(request, spec, steps, call, self._may_run)

    def _arguments(self, request: StageRequest, spec: Spec) -> dict[str, Any]:
        arguments: dict[str, Any] = {name: getattr(spec, name) for name in GIVEN if name in request.params}
        if images := pictures.input_images(request.tensors):
            arguments["image"] = images[0]
        if (mask := pictures.input_mask(request.tensors)) is not None:
            arguments["mask_image"] = mask
        if "use_resolution_binning" in self._takes:
            # It would draw another size and stretch it.
            arguments["use_resolution_binning"] = False
        if spec.seconds:
            arguments["audio_end_in_s"] = spec.audio_start_in_s + spec.seconds
        generator = torch.Generator("cpu").manual_seed(request.seed)
        return {**arguments, "generator": generator, "output_type": "np"}

    def _call(self, arguments: dict[str, Any], pause: Callable[[], None]) -> Any:
        """Call the pipeline, with a scheduler of the call's own, pausing after each step."""
        pipe = self.pipe if self.options.cache_backend else copy.copy(self.pipe)
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
        self._has_pipe = state.request.request
        try:
            state.call.resume()
        except (ValueError, TypeError) as error:
            # A pipeline checks its inputs before its first step.
            return InvalidRequest(f"{error}") if state.index == 0 else error
        except Exception as error:
            return error
        state.index += 1
        if state.call.done:
            self._has_pipe = None
            return self._finished(state)
        return [StepOutput(meta=self._progress(state))] if state.spec.progress else []

    @staticmethod
    def _progress(state: CallState) -> dict[str, Any]:
        return {"step": min(state.index, state.steps), "steps": state.steps}

    def _finished(self, state: CallState) -> StepResult:
        result, spec, seed = state.call.result, state.spec, state.request.seed
        if (audio := getattr(result, "audios", None)) is not None:
            return [_sound(np.asarray(audio[0], "float32").T, self.pipe.vae.config.sampling_rate)]
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
        meta: dict[str, Any] = {**self._progress(state), "seed": state.request.seed}
        if spec.upscale_to is not None:
            meta["upscaled_from"] = [width, height]
            pixels = pictures.resized(pixels, spec.upscale_to)
        return [StepOutput(tensors={"pixels": pixels}, meta=meta, final=True)]

    def abort(self, state: CallState) -> None:
        """End the call where it stands."""
        state.call.cancel()
        if self._has_pipe == state.request.request:
            self._has_pipe = None

    def close(self) -> None:
        """The process ends with the model."""


def _enable_cache_dit(pipe: Any, settings: dict[str, Any]) -> None:
    try:
        import cache_dit
    except ImportError:
        raise ConfigError("cache_backend cache_dit needs omni_async[diffusion-tools].") from None
    try:
        cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(**settings))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"cache_backend cache_dit: {error}") from None


def _sound(pcm: NDArray[np.float32], rate: int) -> StepOutput:
    return StepOutput({"pcm": pcm}, {"sample_rate": rate}, duration=len(pcm) / rate, final=True)


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
