"""What a diffusion stage keeps per request."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import TYPE_CHECKING, Any

from omni_async.stages.diffusion.spec import Spec
from omni_async.stages.executor import StageRequest, State

if TYPE_CHECKING:
    import torch

    from omni_async.stages.diffusion.adapter import Adapter


class Phase(Enum):
    """What a request's next step does."""

    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"


class Encoding(dict[str, Any]):
    """A text as the transformer takes it: tensors by name. A class of its own so that it can be
    referenced weakly."""

    __slots__ = ("__weakref__",)


class DiffusionState(State):
    """One request: its texts encoded, its own scheduler and generator, its latents, how far it is.

    `latents` is what the family's transformer takes, with a leading dimension of 1. `context` holds what
    else the family keeps per request.
    """

    def __init__(self, request: StageRequest, spec: Spec, adapter: Adapter, *, has_upstream: bool) -> None:
        super().__init__(request, has_upstream=has_upstream)
        self.spec = spec
        self.adapter = adapter
        self.phase = Phase.ENCODE
        self.cond: Encoding = Encoding()
        self.uncond: Encoding | None = None
        self.scheduler: Any = None
        self.generator: torch.Generator | None = None
        self.timesteps: list[torch.Tensor] = []
        self.index = 0
        self.latents: Any = None
        self.context: dict[str, Any] = {}
        self.lora = ""

    @property
    def batch_key(self) -> Hashable:
        """Requests in one phase and of what the family can put together."""
        return self.adapter.batch_key(self)

    @property
    def timestep(self) -> torch.Tensor:
        """The scheduler's time of the next step, a scalar tensor."""
        return self.timesteps[self.index]

    @property
    def guidance(self) -> float:
        """How much the prompt weighs against the negative prompt."""
        return self.adapter.guidance_of(self.spec)

    @property
    def denoised(self) -> bool:
        """Every step is done."""
        return self.index >= len(self.timesteps)
