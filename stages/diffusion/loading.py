"""From a stage's config to a loaded diffusers pipeline and its family's adapter."""

from __future__ import annotations

import importlib
import json
import logging
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from omni_async.config import StageConfig
from omni_async.errors import ConfigError
from omni_async.stages.diffusion.adapter import Adapter
from omni_async.stages.diffusion.features import apply_options
from omni_async.stages.diffusion.options import Options
from omni_async.stages.diffusion.parallel import parallelize

log = logging.getLogger(__name__)

_loading = threading.Lock()
# Where stages are threads of one process: the libraries change how all networks are made while they load one.


TEXTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3", "tokenizer_4", "processor")
DENOISERS = ("transformer", "transformer_2", "unet")
LEFT_OUT = {
    "text_encoder": (*DENOISERS, "vae"),
    "diffusion": (*TEXTS, *TOKENIZERS, "vae"),
    "vae": (*TEXTS, *TOKENIZERS, *DENOISERS),
}
"""By the kind of a stage that is one of several, what the others have."""


def load_adapter(config: StageConfig, options: Options, part: str = "") -> Adapter:
    """The pipeline of `config.model` under the adapter of `config.model_arch`; with `part`, the kind of a
    stage that is one of several, without the weights of the others. Raises `ConfigError`."""
    module = _module(config)
    if part and module.Adapter.vae_beside:
        raise ConfigError(f"Stage {config.name}: {config.model_arch} cannot be split into several stages.")
    with _loading:
        components = load_components(config)
        if part:
            components |= _hollow(folder_of(config), LEFT_OUT[part])
        adapter = module.Adapter(load_pipeline(config, options, **components))
    if part:
        adapter.device = adapter.text_device = torch.device(config.devices[0])
        adapter.no_lora = "a pipeline of several stages takes no LoRA"
    apply_options(adapter, options, config.devices[0])
    if options.world_size > 1:
        parallelize(adapter, options)
    return adapter


def _hollow(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Components without weights: networks of diffusers as their configs alone (adapters read sizes there),
    text encoders and tokenizers as None."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for name in names:
        library, cls = index.get(name) or (None, "")
        if library is None:
            continue
        found[name] = None
        if library == "diffusers":
            kind = getattr(diffusers, cls)
            with init_empty_weights():
                found[name] = kind.from_config(kind.load_config(folder, subfolder=name))
    return found


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
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module) and part.device.type != "meta":
            part.to(device)
    return pipe


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
