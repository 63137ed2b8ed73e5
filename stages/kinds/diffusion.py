"""The `diffusion` kind: diffusers pipelines, run by steps."""

from __future__ import annotations

from omni_async.config import StageConfig
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.diffusion.loading import load_adapter
from omni_async.stages.diffusion.options import read_options
from omni_async.stages.executor import Executor


def create(config: StageConfig) -> Executor:
    """The executor of a `diffusion` stage. Raises `ConfigError`."""
    options = read_options(config)
    return DiffusionExecutor(config, options, lambda: load_adapter(config, options))
