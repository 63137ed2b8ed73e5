"""Step caches of diffusers: parts of the network whose output hardly changes from step to step are not
run. Their state is kept per request and branch, and dropped with the request."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import CacheMixin, FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig
from diffusers.hooks.hooks import StateManager

from omni_async.errors import ConfigError

CONFIGS: dict[str, type[Any]] = {
    "first_block": FirstBlockCacheConfig,
    "taylorseer": TaylorSeerCacheConfig,
    "magcache": MagCacheConfig,
}
"""Those whose state diffusers keeps by the name of a context. Pyramid attention broadcast and FasterCache
keep one state for all, which would mix requests up."""


class StepCache:
    """The cache of one network. Requests that use it run in steps of their own."""

    def __init__(self, network: torch.nn.Module, backend: str, settings: dict[str, Any]) -> None:
        if not isinstance(network, CacheMixin):
            raise ConfigError(f"cache_backend: {type(network).__name__} has no caches in diffusers.")
        try:
            config = CONFIGS[backend](**settings)
        except TypeError as error:
            raise ConfigError(f"cache_config: {error}.") from None
        if backend == "magcache" and config.mag_ratios is not None:
            config.mag_ratios = torch.as_tensor(config.mag_ratios)
        self._network: Any = network
        try:
            network.enable_cache(config)
        except ValueError as error:
            raise ConfigError(f"cache_backend {backend}: {error}") from None
        # MagCache counts to a fixed number of steps.
        self.steps: int | None = config.num_inference_steps if backend == "magcache" else None

    @contextmanager
    def of(self, request: int, branch: str) -> Generator[None, None, None]:
        """Inside, the network goes on from where this request's `branch` was."""
        with self._network.cache_context(f"{request}:{branch}"):
            yield

    def drop(self, request: int) -> None:
        """Forget what is kept for a request."""
        for manager in self._managers():
            kept: dict[str, Any] = manager._state_cache
            for name in [name for name in kept if name.startswith(f"{request}:")]:
                del kept[name]

    def _managers(self) -> list[Any]:
        registries = [
            module._diffusers_hook for module in self._network.modules() if hasattr(module, "_diffusers_hook")
        ]
        hooks = [hook for registry in registries for hook in registry.hooks.values()]
        return [value for hook in hooks for value in vars(hook).values() if isinstance(value, StateManager)]

    @property
    def kept(self) -> set[str]:
        """The requests and branches for which something is kept."""
        return {name for manager in self._managers() for name in manager._state_cache}
