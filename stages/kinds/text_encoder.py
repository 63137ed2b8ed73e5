"""The `text_encoder` kind: the text encoders of a diffusion pipeline as a stage of their own."""

from __future__ import annotations

from omni_async.config import StageConfig
from omni_async.stages.diffusion.options import read_options
from omni_async.stages.diffusion.split import TextEncoderExecutor
from omni_async.stages.executor import Executor


def create(config: StageConfig) -> Executor:
    """The executor. Raises `ConfigError`."""
    return TextEncoderExecutor(config, read_options(config))
