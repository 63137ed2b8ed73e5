"""Qwen3-Omni's thinker on vLLM: with the hidden states that its talker was trained on."""

from __future__ import annotations

import msgspec
from transformers import AutoConfig

from omni_async.config import StageConfig
from omni_async.stages.executor import Executor
from omni_async.stages.kinds import vllm


def create(config: StageConfig) -> Executor:
    """The executor of the thinker. Raises `ConfigError`."""
    layer = AutoConfig.from_pretrained(config.model).talker_config.accept_hidden_layer
    extras = {
        "hidden_states": layer,
        "hidden_states_of": "prompt",
        "times_films": True,
        **config.engine_extras,
    }
    return vllm.create(msgspec.structs.replace(config, engine_extras=extras))
