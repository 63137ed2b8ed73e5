"""Qwen2.5-Omni's thinker on vLLM: with the last hidden states, of which all that is spoken is made."""

from __future__ import annotations

import msgspec

from omni_async.config import StageConfig
from omni_async.stages.executor import Executor
from omni_async.stages.kinds import vllm


def create(config: StageConfig) -> Executor:
    """The executor of the thinker. Raises `ConfigError`."""
    extras = {"hidden_states": "last", "times_films": True, **config.engine_extras}
    return vllm.create(msgspec.structs.replace(config, engine_extras=extras))
