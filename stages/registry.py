"""From a stage's config to its executor, found by name: there is no central list."""

from __future__ import annotations

import importlib
import importlib.util

from omni_async.config import StageConfig
from omni_async.errors import ConfigError
from omni_async.stages.executor import Executor


def create_executor(config: StageConfig) -> Executor:
    """`create(config)` of `stages/models/<model_arch>/<kind>.py`, else of `stages/kinds/<kind>.py`.

    Raises `ConfigError` when neither exists.
    """
    for name in _candidates(config):
        if _exists(name):
            return importlib.import_module(name).create(config)
    raise ConfigError(
        f"Stage {config.name}: no kind {config.kind!r}"
        + (f" for model {config.model_arch!r}." if config.model_arch else "."),
        stage=config.name,
    )


def _candidates(config: StageConfig) -> list[str]:
    names = [f"omni_async.stages.kinds.{config.kind}"]
    if config.model_arch:
        names.insert(0, f"omni_async.stages.models.{config.model_arch}.{config.kind}")
    return [name for name in names if all(part.isidentifier() for part in name.split("."))]


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
