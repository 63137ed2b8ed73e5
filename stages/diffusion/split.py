"""Text encoders and VAE as stages of their own: what travels between them and the denoising stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from omni_async.config import StageConfig
from omni_async.errors import InvalidRequest
from omni_async.stages.diffusion import media
from omni_async.stages.diffusion.adapter import Adapter
from omni_async.stages.diffusion.encodings import Encodings
from omni_async.stages.diffusion.loading import load_adapter
from omni_async.stages.diffusion.options import VAE_OPTIONS, Options, refuse_all_but
from omni_async.stages.diffusion.spec import check_defaults, parse
from omni_async.stages.diffusion.state import DiffusionState, Encoding, Phase
from omni_async.stages.executor import StageRequest, StepOutput, StepResult

BRANCHES = ("cond", "uncond")


def to_arrays(state: DiffusionState) -> dict[str, Any]:
    """The request's encodings as numpy arrays, `cond.NAME` and `uncond.NAME`; bfloat16 as float32."""
    encodings = zip(BRANCHES, (state.cond, state.uncond), strict=True)
    return {
        f"{branch}.{name}": as_array(each)
        for branch, encoding in encodings
        for name, each in (encoding or {}).items()
    }


def from_arrays(state: DiffusionState, arrays: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Give the request the encodings that arrived, floats as `dtype` on the adapter's device."""
    found: dict[str, Encoding] = {}
    for key, array in arrays.items():
        branch, _, name = key.partition(".")
        tensor = torch.from_numpy(np.array(array))
        found.setdefault(branch, Encoding())[name] = tensor.to(
            state.adapter.device, dtype if tensor.is_floating_point() else None
        )
    state.cond, state.uncond = found["cond"], found.get("uncond")


def as_array(tensor: torch.Tensor) -> Any:
    """On the CPU, in a dtype that numpy has."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().contiguous().numpy()


class TextEncoderExecutor:
    """The `text_encoder` kind: prompts → encodings, those of several requests in one call."""

    def __init__(self, config: StageConfig, options: Options) -> None:
        self.config = config
        self.options = options
        self._encodings = Encodings(options.prompt_cache_size, batch=not config.deterministic)

    def load(self) -> None:
        """Load the text encoders, and encode a prompt."""
        refuse_all_but(("prompt_cache_size",), self.options, self.config, "a stage of text encoders")
        check_defaults(self.config.default_sampling_params, self.config.name)
        self.adapter = load_adapter(self.config, self.options, "text_encoder")
        self.step([self.admit(StageRequest(request=0, params={"prompt": "a"}, seed=0))])

    def admit(self, request: StageRequest) -> DiffusionState:
        """Raises `InvalidRequest` for what the family cannot do."""
        spec = parse(request.params)
        self.adapter.check(spec)
        _refuse_images(request)
        return DiffusionState(request, spec, self.adapter, has_upstream=False)

    @torch.no_grad()
    def step(self, states: Sequence[DiffusionState]) -> Sequence[StepResult]:
        """All the encodings of each request, at once."""
        self._encodings.fill(states, self._encode)
        return [[StepOutput(tensors=to_arrays(state), final=True)] for state in states]

    def _encode(self, texts: Sequence[str], state: DiffusionState, negative: bool) -> list[Encoding]:
        return (self.adapter.encode_negatives if negative else self.adapter.encode_texts)(texts, state)

    def abort(self, state: DiffusionState) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """The process ends with the model."""


class VaeState(DiffusionState):
    """A request whose latents come in: previews, and the finished ones."""

    @property
    def batch_key(self) -> Any:
        """Latents of one shape for pictures of one size."""
        if self.adapter.alone:
            return self.request.request
        chunk = self.inputs[0]
        latents = chunk.tensors.get("latents")
        shape = None if latents is None else latents.shape
        return (shape, self.spec.width, self.spec.height, *self.adapter.group_of_media(self))


class VaeExecutor:
    """The `vae` kind: latents → media."""

    def __init__(self, config: StageConfig, options: Options) -> None:
        self.config = config
        self.options = options

    def load(self) -> None:
        """Load the VAE."""
        refuse_all_but(VAE_OPTIONS, self.options, self.config, "a stage that decodes")
        check_defaults(self.config.default_sampling_params, self.config.name)
        self.adapter: Adapter = load_adapter(self.config, self.options, "vae")
        self.adapter.alone = self.config.deterministic

    def admit(self, request: StageRequest) -> VaeState:
        """Nothing is refused here that the first stage has not refused."""
        return VaeState(request, parse(request.params), self.adapter, has_upstream=True)

    @torch.no_grad()
    def step(self, states: Sequence[VaeState]) -> Sequence[StepResult]:
        """One chunk of each request: latents of one shape together; what is told of progress goes on."""
        chunks = [state.inputs[0] for state in states]
        if "latents" not in chunks[0].tensors:
            made: list[StepResult] = [[StepOutput(meta=dict(chunk.meta))] for chunk in chunks]
        else:
            made = self._decoded(states, chunks)
        for state in states:
            state.inputs.popleft()
        return made

    def _decoded(self, states: Sequence[VaeState], chunks: Sequence[Any]) -> list[StepResult]:
        latents = torch.cat([torch.from_numpy(np.array(chunk.tensors["latents"])) for chunk in chunks])
        for state, chunk in zip(states, chunks, strict=True):
            state.context |= {name: array for name, array in chunk.tensors.items() if name != "latents"}
        many = self.adapter.post_decode(latents.to(self.adapter.device), states[0])
        return [
            [self._output(each, state, dict(chunk.meta))]
            for each, state, chunk in zip(many, states, chunks, strict=True)
        ]

    def _output(self, each: Any, state: VaeState, told: dict[str, Any]) -> StepOutput:
        partial = told.pop("partial", None)
        if partial is not None:
            return media.picture(each, state.spec, told, partial)
        return media.finished(each, state.spec, told, self.adapter.sample_rate)

    def abort(self, state: VaeState) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """The process ends with the model."""


def receive(state: DiffusionState) -> None:
    """Take what the text encoders made. Raises `InvalidRequest` for an image: the VAE is elsewhere."""
    chunk = state.inputs[0]
    from_arrays(state, chunk.tensors, state.adapter.transformer.dtype)
    state.inputs.popleft()


def send(
    state: DiffusionState, latents: torch.Tensor, told: dict[str, Any], partial: int | None
) -> StepOutput:
    """Latents on their way to the VAE's stage."""
    meta = told if partial is None else {**told, "partial": partial}
    state.phase = Phase.DECODE if partial is None else state.phase
    return StepOutput(tensors={"latents": as_array(latents)}, meta=meta, final=partial is None)


def _refuse_images(request: StageRequest) -> None:
    if "image0" in request.tensors:
        message = "This pipeline's VAE is a stage of its own, after the denoising: it takes no images."
        raise InvalidRequest(message, param="image")
