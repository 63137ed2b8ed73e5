"""From a stage's config to a loaded diffusers pipeline and its family's adapter."""

from __future__ import annotations

import importlib
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from omni_async.config import StageConfig
from omni_async.errors import ConfigError
from omni_async.stages.diffusion.adapter import Adapter
from omni_async.stages.diffusion.features import apply_options
from omni_async.stages.diffusion.options import Options

log = logging.getLogger(__name__)


def load_adapter(config: StageConfig, options: Options) -> Adapter:
    """The pipeline of `config.model` under the adapter of `config.model_arch`. Raises `ConfigError`."""
    adapter = _module(config).Adapter(load_pipeline(config, options, **load_components(config)))
    apply_options(adapter, options, config.devices[0])
    return adapter


def has_adapter(config: StageConfig) -> bool:
    """Whether the model's folder says how its pipeline is stepped."""
    return find_spec(f"omni_async.stages.models.{config.model_arch}.adapter") is not None


def _module(config: StageConfig) -> Any:
    return importlib.import_module(f"omni_async.stages.models.{config.model_arch}.adapter")


def load_components(config: StageConfig) -> dict[str, Any]:
    """The components that the family loads in its own way, if any."""
    components = getattr(_module(config), "components", None) if has_adapter(config) else None
    return {} if components is None else components(folder_of(config))


def folder_of(config: StageConfig) -> Path:
    """Where the model lies, fetched if need be. Raises `ConfigError`."""
    if not config.model:
        raise ConfigError(f"Stage {config.name}: model names no diffusers folder.", stage=config.name)
    if Path(config.model).is_dir():
        return Path(config.model)
    try:
        return Path(DiffusionPipeline.download(config.model))
    except (OSError, ValueError) as error:
        raise ConfigError(f"Stage {config.name}: {config.model} cannot be fetched: {error}") from None


def load_pipeline(config: StageConfig, options: Options, **components: Any) -> DiffusionPipeline:
    """The pipeline's components, on their devices. Raises `ConfigError`."""
    folder = folder_of(config)
    _quiet()
    device = config.devices[0]
    try:
        pipe = DiffusionPipeline.from_pretrained(
            folder,
            dtype=dtype_of(options, device),
            trust_remote_code=options.trust_remote_code,
            **components,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"Stage {config.name}: {config.model} does not load: {error}") from None
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def _quiet() -> None:
    """Without the libraries' progress bars and their advice to authors of models."""
    for logging_of in (diffusers_logging, transformers_logging):
        logging_of.disable_progress_bar()
        logging_of.set_verbosity_error()


def dtype_of(options: Options, device: str) -> torch.dtype:
    """What the weights are loaded as."""
    if options.dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return getattr(torch, options.dtype)
