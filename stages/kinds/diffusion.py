"""The `diffusion` kind: diffusers pipelines, run by steps where their family has an adapter, else as whole
calls."""

from __future__ import annotations

from omni_async.config import StageConfig
from omni_async.errors import ConfigError
from omni_async.stages.diffusion.executor import DiffusionExecutor
from omni_async.stages.diffusion.loading import has_adapter, load_adapter
from omni_async.stages.diffusion.options import VAE_OPTIONS, Options, read_options, refuse_all_but
from omni_async.stages.diffusion.whole_call import WholeCallExecutor
from omni_async.stages.executor import Executor


def create(config: StageConfig) -> Executor:
    """The executor of a `diffusion` stage. Raises `ConfigError`."""
    options = read_options(config)
    if options.cache_backend == "cache_dit" or not has_adapter(config):
        return WholeCallExecutor(config, options)
    part = "diffusion" if config.inputs else ""
    if bool(config.inputs) == config.final_output:
        raise ConfigError(
            f"Stage {config.name}: a diffusion stage stands alone, or between a text_encoder and a vae stage."
        )
    if part:
        elsewhere = ("prompt_cache_size", "preview_method", "max_loras", "component_devices")
        others = [name for name in Options.__struct_fields__ if name not in (*elsewhere, *VAE_OPTIONS)]
        refuse_all_but(others, options, config, "text encoders and VAE in stages of their own")
    return DiffusionExecutor(config, options, lambda: load_adapter(config, options, part))
