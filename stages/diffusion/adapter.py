"""What all diffusion families share; one subclass per family says what it does in its own way.

A family is the components of a diffusers pipeline, called one step at a time. Every method here and in
the subclasses does what the pipeline's `__call__` does in the same place, in the same order and with the
same row layout, so that a request alone gives the same bits as the pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion.caching import StepCache
from omni_async.stages.diffusion.loras import Loras
from omni_async.stages.diffusion.spec import Spec
from omni_async.stages.diffusion.state import DiffusionState, Encoding, Phase

Tensor = torch.Tensor
Row = tuple[DiffusionState, Encoding]
"""One row of a forward pass: a request, and which of its encodings it goes with."""


class Adapter:
    """A diffusers pipeline by steps.

    `guidance` says how the two rows of a guided request are run, as in the pipeline: "uncond_first" or
    "cond_first" in one forward pass, "separate" in two. `scale_name` is the parameter that weighs the
    negative prompt; above `scale_floor` it takes effect. `pads` says that rows of several sizes can share
    a forward pass, `lora_per_row` that rows of several LoRA adapters can. `vae_beside` says that
    the VAE must be on the transformer's device. `sample_rate` (Hz) is of families that make sound.
    `network` is diffusers' class of the denoiser; `dispatches_attention` says that its attention has a choice
    of backends.
    """

    guidance: ClassVar[Literal["separate", "uncond_first", "cond_first"]] = "separate"
    scale_name: ClassVar[Literal["guidance_scale", "true_cfg_scale"]] = "guidance_scale"
    scale_floor: ClassVar[float] = 1.0
    default_scale: ClassVar[float] = 1.0
    default_negative: ClassVar[str] = ""
    default_length: ClassVar[int] = 256
    pads: ClassVar[bool] = False
    lora_per_row: ClassVar[bool] = True
    network: ClassVar[str] = ""
    denoiser: ClassVar[str] = "transformer"
    dispatches_attention: ClassVar[bool] = False
    needs_image: ClassVar[bool] = False
    vae_beside: ClassVar[bool] = False
    multiple_of: int = 16
    sample_rate: int = 0

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.mixes_sizes = self.pads
        self.alone = False
        """Whether each request runs in steps of its own."""
        self.loras = Loras(pipe, self.transformer)
        self.no_lora = ""
        self.cache: StepCache | None = None
        self.device = torch.device(pipe._execution_device)
        self.text_device = self.device
        """Where texts are encoded; latents and encodings are on `device`."""

    @property
    def transformer(self) -> Any:
        """The network that is run once a step."""
        return getattr(self.pipe, self.denoiser)

    @property
    def networks(self) -> list[Any]:
        """All networks that steps run: `transformer`, and others where a family has them for some steps."""
        return [self.transformer]

    def check(self, spec: Spec) -> None:
        """Raises `InvalidRequest` for what the family cannot do."""
        step = self.multiple_of
        if spec.width % step or spec.height % step:
            near = [max(round(side / step), 1) * step for side in (spec.width, spec.height)]
            message = (
                f"size {spec.width}x{spec.height} is not made by this model; "
                f"the nearest size is {near[0]}x{near[1]}."
            )
            raise InvalidRequest(message, param="size", code="unsupported_size")
        if spec.lora is not None and self.no_lora:
            raise InvalidRequest(f"lora: {self.no_lora}.", param="lora")
        if self.cache is not None and self.cache.steps not in (None, spec.num_inference_steps):
            message = f"This server's cache is for {self.cache.steps} steps."
            raise InvalidRequest(message, param="num_inference_steps")
        if spec.negative_prompt is not None and not self.is_guided(spec):
            message = f"negative_prompt has no effect unless {self.scale_name} is above {self.scale_floor:g}."
            raise InvalidRequest(message, param="negative_prompt")

    def guidance_of(self, spec: Spec) -> float:
        """The weight of the prompt against the negative prompt."""
        given = getattr(spec, self.scale_name)
        return self.default_scale if given is None else given

    def is_guided(self, spec: Spec) -> bool:
        """Whether the negative prompt takes part."""
        return self.guidance_of(spec) > self.scale_floor

    def batch_key(self, state: DiffusionState) -> Hashable:
        """What may share a step with `state`."""
        if self.alone:
            return state.request.request
        if state.phase is Phase.ENCODE:
            return state.phase
        key = (state.phase, *self.group(state), "" if self.lora_per_row else state.lora)
        if state.phase is Phase.DENOISE and self.mixes_sizes:
            return key
        return (*key, state.spec.width, state.spec.height, tuple(state.latents.shape))

    def group(self, state: DiffusionState) -> tuple[Hashable, ...]:
        """What else rows of one forward pass must have in common."""
        return ()

    def group_of_media(self, state: DiffusionState) -> tuple[Hashable, ...]:
        """What else latents that are decoded together must have in common."""
        return ()

    def texts_of(self, state: DiffusionState) -> tuple[str, str | None]:
        """The prompt, and the negative prompt if it takes part."""
        spec = state.spec
        if not self.is_guided(spec):
            return spec.prompt, None
        negative = spec.negative_prompt
        return spec.prompt, self.default_negative if negative is None else negative

    def length_of(self, spec: Spec) -> int:
        """Tokens up to which texts are encoded."""
        return spec.max_sequence_length or self.default_length

    def media_key(self, state: DiffusionState) -> Hashable:
        """What an encoding depends on beside its text."""
        return None

    def encode_texts(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """Each text encoded; `state` is of one request that they belong to."""
        raise NotImplementedError

    def encode_negatives(self, texts: Sequence[str], state: DiffusionState) -> list[Encoding]:
        """Each negative prompt encoded."""
        return self.encode_texts(texts, state)

    def prepare(self, state: DiffusionState) -> None:
        """Give `state` its generator, latents, scheduler and timesteps."""
        raise NotImplementedError

    def forward(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """The network's output for each row, with a leading dimension of 1."""
        raise NotImplementedError

    def guide(self, state: DiffusionState, cond: Tensor, uncond: Tensor) -> Tensor:
        """The two rows of a guided request as one prediction."""
        return uncond + state.guidance * (cond - uncond)

    def finish_prediction(self, prediction: Tensor) -> Tensor:
        """The prediction as the scheduler takes it."""
        return prediction

    def run(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """`forward`, each row with its request's LoRA and cache."""
        self.loras.activate([state.lora for state, _ in rows])
        if self.cache is None:
            return self.forward(rows)
        state, encoding = rows[0]
        branch = "both" if len(rows) > 1 else "cond" if encoding is state.cond else "uncond"
        with self.cache.of(state.request.request, branch):
            return self.forward(rows)

    def forget(self, state: DiffusionState) -> None:
        """Let go of what is kept for a request outside its state."""
        self.loras.release(state.lora)
        if self.cache is not None:
            self.cache.drop(state.request.request)

    def denoise_step(self, states: Sequence[DiffusionState]) -> list[Tensor]:
        """One prediction per request, guidance applied."""
        cond = [(state, state.cond) for state in states]
        uncond = [(state, state.uncond) for state in states if state.uncond is not None]
        if self.guidance == "uncond_first":
            out = self.run([*uncond, *cond])
            negative, positive = out[: len(uncond)], out[len(uncond) :]
        elif self.guidance == "cond_first" or (uncond and not self.alone):
            # One pass costs less than two; those who want the pipeline's own bits run alone.
            out = self.run([*cond, *uncond])
            positive, negative = out[: len(cond)], out[len(cond) :]
        else:
            positive, negative = self.run(cond), self.run(uncond) if uncond else ()
        left = iter(negative)
        guided = [
            self.guide(state, row, next(left)) if state.uncond is not None else row
            for state, row in zip(states, positive, strict=True)
        ]
        return [self.finish_prediction(prediction) for prediction in guided]

    def step_scheduler(self, state: DiffusionState, prediction: Tensor) -> None:
        """Take the step that `prediction` says."""
        extra = self.step_arguments(state)
        state.latents = state.scheduler.step(
            prediction, state.timestep, state.latents, **extra, return_dict=False
        )[0]
        state.index += 1

    def step_arguments(self, state: DiffusionState) -> dict[str, Any]:
        """What the scheduler's `step` takes beside the prediction."""
        return {}

    def estimate(self, state: DiffusionState, prediction: Tensor) -> Tensor:
        """The finished latents as they are foreseen before the step of `prediction` is taken."""
        scheduler = state.scheduler
        flows = scheduler.config.get("prediction_type") == "flow_prediction"
        if not flows and "Euler" not in type(scheduler).__name__:
            return state.latents
        begin = len(scheduler.sigmas) - 1 - len(state.timesteps)
        sigma = scheduler.sigmas[begin + state.index].to(self.device)
        if scheduler.config.get("prediction_type") == "v_prediction":
            return state.latents / (sigma**2 + 1) - prediction * sigma / (sigma**2 + 1) ** 0.5
        return state.latents - sigma * prediction

    def spatial(self, latents: Tensor, state: DiffusionState) -> Tensor | None:
        """The latents as `[rows, channels, height, width]`; None where they are no picture."""
        return latents if latents.ndim == 4 else None

    def decode(self, latents: Tensor, state: DiffusionState) -> Tensor:
        """Latents of several requests as pictures, float `[rows, 3, height, width]` in [0, 1]; `state` is
        of one of them."""
        raise NotImplementedError

    def post_decode(self, latents: Tensor, state: DiffusionState) -> NDArray[Any]:
        """Latents as media: uint8 `[rows, height, width, 3]`."""
        return to_uint8(self.decode(latents, state))

    def vae_decode(self, latents: Tensor) -> Tensor:
        """Latents as the VAE takes them → pictures, float `[rows, 3, height, width]` in [0, 1]."""
        vae = self.pipe.vae
        pictures = vae.decode(latents.to(vae.device, vae.dtype), return_dict=False)[0]
        return self.pipe.image_processor.postprocess(pictures, output_type="pt")

    def unscaled(self, latents: Tensor) -> Tensor:
        """Latents at the VAE's own scale."""
        config = self.pipe.vae.config
        return (latents / config.scaling_factor) + config.shift_factor

    def pipe_with(self, scheduler: Any) -> Any:
        """The pipeline over another scheduler, for those of its parts that ask it."""
        pipe = copy.copy(self.pipe)
        pipe.scheduler = scheduler
        return pipe

    def new_scheduler(self) -> Any:
        """A scheduler of the request's own: it counts steps."""
        return copy.deepcopy(self.pipe.scheduler)

    def new_generator(self, state: DiffusionState) -> torch.Generator:
        """The source of the request's noise; on the CPU, so that every device draws the same."""
        return torch.Generator("cpu").manual_seed(state.request.seed)


def to_uint8(pictures: Tensor) -> NDArray[np.uint8]:
    """Float `[rows, 3, height, width]` in [0, 1] → uint8 `[rows, height, width, 3]`, rounded as diffusers
    does for PIL."""
    array = pictures.permute(0, 2, 3, 1).float().cpu().numpy()
    return (array * 255).round().astype("uint8")
