"""`engine_extras` of a diffusion stage, under the names that users of such servers know."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from omni_async.config import StageConfig
from omni_async.errors import ConfigError

Degree = Annotated[int, Meta(ge=1)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a diffusion pipeline is loaded and run; what is not named is off.

    `dtype` is float32 on CPUs and bfloat16 elsewhere where "auto". `component_devices` maps components
    (`text_encoder`, `vae`, …) to devices of their own. `max_loras` adapters stay loaded. `preview_method`
    says how partial images are made: by the VAE, or by a linear map from latents to colours.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    component_devices: dict[str, str] = {}
    prompt_cache_size: Annotated[int, Meta(ge=0)] = 16
    preview_method: Literal["vae", "latent"] = "vae"
    max_loras: Degree = 8
    cache_backend: Literal["first_block", "taylorseer", "magcache", "cache_dit"] | None = None
    cache_config: dict[str, Any] = {}
    quantization: Literal["int8", "fp8", "fp8_layerwise"] | None = None
    enable_cpu_offload: bool = False
    enable_layerwise_offload: bool = False
    vae_use_slicing: bool = False
    vae_use_tiling: bool = False
    diffusion_attention_backend: str | None = None
    attention_backends: dict[str, str] = {}
    ulysses_degree: Degree = 1
    ring_degree: Degree = 1
    cfg_parallel_size: Degree = 1
    tensor_parallel_size: Degree = 1
    enforce_eager: bool = True
    trust_remote_code: bool = False

    @property
    def world_size(self) -> int:
        """Processes that run one stage together."""
        return self.ulysses_degree * self.ring_degree * self.cfg_parallel_size * self.tensor_parallel_size


def read_options(config: StageConfig) -> Options:
    """The stage's options. Raises `ConfigError` with the nearest known name."""
    known = Options.__struct_fields__
    for key in config.engine_extras:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
            raise ConfigError(f"Stage {config.name}: engine_extras.{key}: unknown key, {hint}")
    try:
        return msgspec.convert(config.engine_extras, Options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Stage {config.name}: engine_extras: {error}.") from None


VAE_OPTIONS = ("vae_use_slicing", "vae_use_tiling")
LOADING = ("dtype", "trust_remote_code")
"""Options that concern every stage which loads weights."""


def refuse_all_but(names: Sequence[str], options: Options, config: StageConfig, what: str) -> None:
    """Raises `ConfigError` for an option beside `names` and `LOADING` that is set: it would have no effect
    on `what`."""
    usual = Options()
    for name in Options.__struct_fields__:
        if name not in (*names, *LOADING) and getattr(options, name) != getattr(usual, name):
            raise ConfigError(f"Stage {config.name}: {name} cannot be combined with {what}.")
