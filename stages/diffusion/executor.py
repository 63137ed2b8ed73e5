"""A diffusers pipeline as an executor: encode, denoise step by step, decode; requests join between steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from omni_async.config import StageConfig
from omni_async.errors import StageFailed
from omni_async.stages.diffusion import media, pictures, split
from omni_async.stages.diffusion.adapter import Adapter, Tensor
from omni_async.stages.diffusion.encodings import Encodings
from omni_async.stages.diffusion.options import Options
from omni_async.stages.diffusion.parallel import Peers
from omni_async.stages.diffusion.spec import check_defaults, parse
from omni_async.stages.diffusion.state import DiffusionState, Encoding, Phase
from omni_async.stages.executor import StageRequest, StepOutput, StepResult, outputs_of

log = logging.getLogger(__name__)

WARM_STEPS = 4


class DiffusionExecutor:
    """One pipeline, stepped. `load_adapter` loads it."""

    def __init__(self, config: StageConfig, options: Options, load_adapter: Callable[[], Adapter]) -> None:
        self.config = config
        self.options = options
        self._load_adapter = load_adapter
        self._encodings = Encodings(options.prompt_cache_size, batch=not config.deterministic)
        self._colours: pictures.LatentColours | None = None
        self._peers: Peers | None = None

    def load(self) -> None:
        """Load the pipeline and draw one picture with it."""
        check_defaults(self.config.default_sampling_params, self.config.name)
        self.adapter = self._load_adapter() if self.options.world_size == 1 else self._load_with_peers()
        self.adapter.alone = self.adapter.alone or self.config.deterministic
        self.adapter.loras.limit = self.options.max_loras
        if not self.config.inputs:
            self._warm()

    def _load_with_peers(self) -> Adapter:
        self._peers = Peers(self.config, self.options)
        try:
            adapter = self._load_adapter()
        except BaseException:
            self._peers.kill()
            raise
        self._peers.lead(adapter.transformer)
        return adapter

    def _warm(self) -> None:
        params = {**self.config.default_sampling_params, "prompt": "a", "num_inference_steps": WARM_STEPS}
        side = self.adapter.multiple_of * 4
        params = {"width": side, "height": side, **params}
        image = {"image0": np.zeros((side, side, 3), np.uint8)} if self.adapter.needs_image else {}
        state = self.admit(StageRequest(request=0, params=params, seed=0, tensors=image))
        while not any(output.final for output in outputs_of(self.step([state])[0])):
            pass

    def admit(self, request: StageRequest) -> DiffusionState:
        """Raises `InvalidRequest` for what the family cannot do."""
        spec = parse(request.params)
        self.adapter.check(spec)
        return DiffusionState(request, spec, self.adapter, has_upstream=bool(self.config.inputs))

    @torch.inference_mode()
    def step(self, states: Sequence[DiffusionState]) -> Sequence[StepResult]:
        """The next step of requests that are in the same phase."""
        work = {Phase.ENCODE: self._encode, Phase.DENOISE: self._denoise, Phase.DECODE: self._decode}
        return work[states[0].phase](states)

    def _encode(self, states: Sequence[DiffusionState]) -> Sequence[StepResult]:
        failed = {state.request.request: error for state in states if (error := self._load_lora(state))}
        good = [state for state in states if state.request.request not in failed]
        if self.config.inputs:
            for state in good:
                split.receive(state)
        else:
            self._encodings.fill(good, self._encode_texts)
        return [failed.get(state.request.request) or self._prepared(state) for state in states]

    def _load_lora(self, state: DiffusionState) -> Exception | None:
        if state.spec.lora is None or state.lora:
            return None
        try:
            with torch.inference_mode(False):
                state.lora = self.adapter.loras.use(state.spec.lora)
        except Exception as error:
            return error
        return None

    def _encode_texts(self, texts: Sequence[str], state: DiffusionState, negative: bool) -> list[Encoding]:
        adapter = self.adapter
        adapter.loras.activate_texts(state.lora)
        device, adapter.device = adapter.device, adapter.text_device
        try:
            made = (adapter.encode_negatives if negative else adapter.encode_texts)(texts, state)
        finally:
            adapter.device = device
        return [Encoding({name: each.to(device) for name, each in encoding.items()}) for encoding in made]

    def _prepared(self, state: DiffusionState) -> StepResult:
        try:
            self.adapter.prepare(state)
        except Exception as error:
            return error
        state.phase = Phase.DENOISE
        return []

    def _denoise(self, states: Sequence[DiffusionState]) -> Sequence[StepResult]:
        predictions = self.adapter.denoise_step(states)
        return [self._stepped(state, each) for state, each in zip(states, predictions, strict=True)]

    def _stepped(self, state: DiffusionState, prediction: Tensor) -> StepResult:
        try:
            partial = self._partial_due(state)
            foreseen = None if partial is None else self.adapter.estimate(state, prediction)
            self.adapter.step_scheduler(state, prediction)
            if state.denoised:
                state.phase = Phase.DECODE
            if partial is not None and foreseen is not None:
                return [self._preview(state, foreseen, partial)]
        except Exception as error:
            return error
        told = {"step": state.index, "steps": len(state.timesteps)}
        return [StepOutput(meta=told)] if state.spec.progress else []

    @staticmethod
    def _partial_due(state: DiffusionState) -> int | None:
        """The number of the preview that is due after this step, if one is."""
        count, steps = state.spec.partial_images, len(state.timesteps)
        due = [(steps * (number + 1)) // (count + 1) for number in range(count)]
        return due.index(state.index + 1) if state.index + 1 in due and state.index + 1 < steps else None

    def _preview(self, state: DiffusionState, latents: Tensor, partial: int) -> StepOutput:
        told = self._told(state)
        if not self.config.final_output:
            return split.send(state, latents, told, partial)
        spatial, spec = self.adapter.spatial(latents, state), state.spec
        if self.options.preview_method == "vae" or self._colours is None or spatial is None:
            return media.picture(self.adapter.post_decode(latents, state)[0], spec, told, partial)
        pixels = pictures.resized(self._colours(spatial), (spec.width, spec.height))
        return media.picture(pixels, spec, told, partial)

    def _decode(self, states: Sequence[DiffusionState]) -> Sequence[StepResult]:
        finite = [bool(torch.isfinite(state.latents).all()) for state in states]
        good = [state for state, is_finite in zip(states, finite, strict=True) if is_finite]
        finals = iter(self._finals(good) if good else ())
        return [
            [next(finals)] if is_finite else _not_finite(state)
            for state, is_finite in zip(states, finite, strict=True)
        ]

    def _finals(self, states: Sequence[DiffusionState]) -> list[StepOutput]:
        if self.config.final_output:
            rate = self.adapter.sample_rate
            made = zip(self._media(states), states, strict=True)
            finals = [media.finished(each, state.spec, self._told(state), rate) for each, state in made]
        else:
            finals = [split.send(state, state.latents, self._told(state), None) for state in states]
        for state in states:
            self.adapter.forget(state)
        return finals

    def _media(self, states: Sequence[DiffusionState]) -> Any:
        latents = torch.cat([state.latents for state in states])
        made = self.adapter.post_decode(latents, states[0])
        if self._colours is None and self.options.preview_method == "latent" and made.ndim == 4:
            spatial = self.adapter.spatial(latents, states[0])
            if spatial is not None:
                self._colours = pictures.LatentColours(spatial, torch.from_numpy(made).movedim(-1, 1) / 255)
        return made

    @staticmethod
    def _told(state: DiffusionState) -> dict[str, Any]:
        return {"seed": state.request.seed, "step": state.index, "steps": len(state.timesteps)}

    def abort(self, state: DiffusionState) -> None:
        """Let go of what the request used."""
        self.adapter.forget(state)

    def close(self) -> None:
        """Let the peers end; the model ends with the process."""
        if self._peers is not None:
            self._peers.close(self.adapter.device)


def _not_finite(state: DiffusionState) -> StageFailed:
    return StageFailed(
        f"The latents are not finite after {state.index} steps: the model's dtype or these parameters "
        "overflow it."
    )
