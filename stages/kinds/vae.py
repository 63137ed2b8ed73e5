"""The `vae` kind: the decoder of a diffusion pipeline as a stage of its own."""

from __future__ import annotations

from omni_async.config import StageConfig
from omni_async.stages.diffusion.options import read_options
from omni_async.stages.diffusion.split import VaeExecutor
from omni_async.stages.executor import Executor


def create(config: StageConfig) -> Executor:
    """The executor. Raises `ConfigError`."""
    return VaeExecutor(config, read_options(config))
