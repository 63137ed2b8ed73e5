"""From a stage's config to a loaded diffusers pipeline and its family's adapter."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging

from omni_async.config import StageConfig
from omni_async.errors import ConfigError
from omni_async.stages.diffusion.adapter import Adapter
from omni_async.stages.diffusion.options import Options

log = logging.getLogger(__name__)


def load_adapter(config: StageConfig, options: Options) -> Adapter:
    """The pipeline of `config.model` under the adapter of `config.model_arch`. Raises `ConfigError`."""
    module = importlib.import_module(f"omni_async.stages.models.{config.model_arch}.adapter")
    components = module.components(folder_of(config)) if hasattr(module, "components") else {}
    return module.Adapter(load_pipeline(config, options, **components))


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
    diffusers_logging.disable_progress_bar()
    device = config.devices[0]
    try:
        pipe = DiffusionPipeline.from_pretrained(
            folder,
            torch_dtype=dtype_of(options, device),
            trust_remote_code=options.trust_remote_code,
            **components,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"Stage {config.name}: {config.model} does not load: {error}") from None
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def dtype_of(options: Options, device: str) -> torch.dtype:
    """What the weights are loaded as."""
    if options.dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return getattr(torch, options.dtype)
