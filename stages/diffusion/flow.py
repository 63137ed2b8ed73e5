"""Flow matching as diffusers' pipelines set it up: shifted sigmas and timesteps."""

from __future__ import annotations

from typing import Any

import numpy as np
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
from numpy.typing import NDArray

from omni_async.stages.diffusion.state import DiffusionState


def linear_sigmas(steps: int) -> NDArray[np.float64]:
    """The sigmas that most pipelines start from, from 1 to 1 / steps."""
    return np.linspace(1.0, 1 / steps, steps)


def shift_of(config: Any, tokens: int, *, max_shift: float = 1.15, max_tokens: int = 4096) -> float:
    """`mu` for a picture of `tokens` latent tokens."""
    return calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", max_tokens),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )


def set_timesteps(state: DiffusionState, device: Any, sigmas: Any = None, **arguments: Any) -> None:
    """Give the request's scheduler its steps."""
    steps = state.spec.num_inference_steps
    retrieve_timesteps(state.scheduler, steps, device, sigmas=sigmas, **arguments)
    state.timesteps = list(state.scheduler.timesteps)
    state.index = 0


def skip_to_strength(state: DiffusionState) -> None:
    """Drop the first steps of an image that is changed, so that `strength` of them are left."""
    steps, order = state.spec.num_inference_steps, state.scheduler.order
    start = int(max(steps - min(steps * state.spec.strength, steps), 0))
    state.timesteps = state.timesteps[start * order :]
    state.scheduler.set_begin_index(start * order)
