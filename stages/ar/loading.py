"""Settings and weights of `ar` stages and of the decoders behind them."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec
import torch

from omni_async.config import StageConfig
from omni_async.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def read_settings(config: StageConfig, struct: type[S]) -> S:
    """`engine_extras` as `struct`. Raises `ConfigError`."""
    for key in config.engine_extras:
        if key not in struct.__struct_fields__:
            known = ", ".join(struct.__struct_fields__)
            raise ConfigError(f"Stage {config.name}: engine_extras.{key}: unknown key, known: {known}.")
    try:
        return msgspec.convert(config.engine_extras, struct)
    except msgspec.ValidationError as error:
        raise ConfigError(f"Stage {config.name}: engine_extras: {error}.") from None


def torch_dtype(name: Dtype, device: str) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 on a CPU."""
    if name == "auto":
        name = "float32" if device == "cpu" else "bfloat16"
    return getattr(torch, name)


def load_model(kind: Any, config: StageConfig, dtype: torch.dtype, **more: Any) -> Any:
    """`kind` with the weights of the stage's model that have its names. Raises `ConfigError`."""
    try:
        model, report = kind.from_pretrained(
            config.model, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, **more
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"Stage {config.name}: {config.model} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):
        message = f"{config.model} has no weights for {', '.join(missing[:3])} ({len(missing)} in all)."
        raise ConfigError(f"Stage {config.name}: {message}")
    return model.to(config.devices[0]).eval()
