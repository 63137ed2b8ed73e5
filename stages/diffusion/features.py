"""What libraries add to a loaded pipeline, by the stage's options: devices, quantization, offloading, VAE
modes, attention backends, compilation, caches.

Whatever a family, or another option, cannot be combined with is refused here, when the stage starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from omni_async.errors import ConfigError
from omni_async.stages.diffusion.adapter import Adapter
from omni_async.stages.diffusion.caching import StepCache
from omni_async.stages.diffusion.options import Options


def apply_options(adapter: Adapter, options: Options, device: str) -> None:
    """Do what `options` say; `device` is the stage's first. Raises `ConfigError`."""
    _refuse_pairs(options)
    for wanted, apply in (
        (options.component_devices, _place_components),
        (options.quantization, _quantize),
        (options.vae_use_slicing, _slice_vae),
        (options.vae_use_tiling, _tile_vae),
        (options.diffusion_attention_backend or options.attention_backends, _choose_attention),
        (options.cache_backend, _cache),
        (options.enable_layerwise_offload, _offload_layers),
        (options.enable_cpu_offload, _offload_components),
        (not options.enforce_eager, _compile),
    ):
        if wanted:
            apply(adapter, options, device)


def _refuse_pairs(options: Options) -> None:
    """Options that exclude each other."""
    offloads = [
        name
        for name in ("enable_cpu_offload", "enable_layerwise_offload", "component_devices")
        if getattr(options, name)
    ]
    if len(offloads) > 1:
        raise ConfigError(f"{offloads[0]} and {offloads[1]} both say where weights lie; choose one.")
    if offloads and options.quantization in ("int8", "fp8"):
        raise ConfigError(f"{options.quantization} weights cannot be moved between devices: {offloads[0]}.")
    if not options.enforce_eager and (offloads or options.cache_backend):
        other = offloads[0] if offloads else "cache_backend"
        raise ConfigError(f"A compiled network (enforce_eager: false) cannot be combined with {other}.")
    if options.cache_config and not options.cache_backend:
        raise ConfigError("cache_config has no effect without cache_backend.")


def _name(adapter: Adapter) -> str:
    return type(adapter.pipe).__name__


def _place_components(adapter: Adapter, options: Options, device: str) -> None:
    parts = {
        name: part for name, part in adapter.pipe.components.items() if isinstance(part, torch.nn.Module)
    }
    for name, place in options.component_devices.items():
        if name not in parts:
            known = ", ".join(parts)
            raise ConfigError(f"component_devices.{name}: {_name(adapter)} has {known}.")
        if any(parts[name] is each for each in adapter.networks) or (name == "vae" and adapter.vae_beside):
            raise ConfigError(f"component_devices.{name}: it runs where the stage does, on {device}.")
        parts[name].to(_device(place))
    encoders = {str(part.device) for name, part in parts.items() if name.startswith("text_encoder")}
    if len(encoders) > 1:
        raise ConfigError(f"component_devices: all text encoders must share a device, not {encoders}.")
    adapter.text_device = torch.device(encoders.pop())


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"component_devices: {name} is no device of this machine: {error}") from None
    return device


def _quantize(adapter: Adapter, options: Options, device: str) -> None:
    """int8 and fp8: weights of linear layers, by torchao; fp8_layerwise: all weights kept in fp8 and cast
    as they are used, by diffusers."""
    if options.quantization == "fp8_layerwise":
        dtype = adapter.transformer.dtype
        for network in adapter.networks:
            network.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)
        return
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError:
        raise ConfigError("quantization needs torchao: omni_async[diffusion-tools].") from None
    for network in adapter.networks:
        quantize_(
            network,
            Int8WeightOnlyConfig() if options.quantization == "int8" else Float8WeightOnlyConfig(),
        )
    adapter.no_lora = f"{options.quantization} weights take no LoRA"


def _vae(adapter: Adapter, option: str, method: str) -> Callable[[], None]:
    vae = adapter.pipe.vae
    if not hasattr(vae, method):
        raise ConfigError(f"{option}: {type(vae).__name__} cannot do that.")
    return getattr(vae, method)


def _slice_vae(adapter: Adapter, options: Options, device: str) -> None:
    _vae(adapter, "vae_use_slicing", "enable_slicing")()


def _tile_vae(adapter: Adapter, options: Options, device: str) -> None:
    _vae(adapter, "vae_use_tiling", "enable_tiling")()


def _choose_attention(adapter: Adapter, options: Options, device: str) -> None:
    """`diffusion_attention_backend` for all attention, `attention_backends` by role: self, cross, joint."""
    modules = [
        module
        for network in adapter.networks
        for module in network.modules()
        if hasattr(getattr(module, "processor", None), "_attention_backend")
    ]
    if not adapter.dispatches_attention:
        raise ConfigError(f"{_name(adapter)}: its attention has no choice of backend.")
    try:
        if options.diffusion_attention_backend:
            for network in adapter.networks:
                _set_backend(network, options.diffusion_attention_backend)
        _choose_by_role(modules, options.attention_backends)
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        raise ConfigError(f"attention backend: {error}") from None
    names = [options.diffusion_attention_backend or "native", *options.attention_backends.values()]
    if not all("native" in name for name in names):
        # Others take no mask.
        adapter.mixes_sizes = False


def _set_backend(network: Any, name: str) -> None:
    """For this network alone: the library would also change it for all others of the process."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before, _ = _AttentionBackendRegistry.get_active_backend()
    try:
        network.set_attention_backend(name)
    finally:
        _AttentionBackendRegistry.set_active_backend(before)


def _choose_by_role(modules: list[Any], backends: dict[str, str]) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName

    by_role: dict[str, list[Any]] = {}
    for module in modules:
        by_role.setdefault(_role(module), []).append(module)
    for role, name in backends.items():
        if role not in by_role:
            known = ", ".join(by_role)
            raise ConfigError(f"attention_backends.{role}: the roles of this model are {known}.")
        backend = AttentionBackendName(name.lower())
        for module in by_role[role]:
            module.processor._attention_backend = backend


def _role(module: Any) -> str:
    if getattr(module, "added_kv_proj_dim", None) is not None:
        return "joint"
    return "cross" if getattr(module, "is_cross_attention", False) else "self"


def _cache(adapter: Adapter, options: Options, device: str) -> None:
    if len(adapter.networks) > 1:
        raise ConfigError(f"cache_backend: {_name(adapter)} has several networks, and a cache is of one.")
    adapter.cache = StepCache(adapter.transformer, options.cache_backend or "", options.cache_config)
    adapter.alone = True


def _offload_layers(adapter: Adapter, options: Options, device: str) -> None:
    for network in adapter.networks:
        network.enable_group_offload(
            onload_device=torch.device(device), offload_device=torch.device("cpu"), offload_type="leaf_level"
        )


def _offload_components(adapter: Adapter, options: Options, device: str) -> None:
    if device == "cpu":
        raise ConfigError("enable_cpu_offload needs an accelerator to offload from; devices names the CPU.")
    adapter.pipe.enable_model_cpu_offload(device=device)


def _compile(adapter: Adapter, options: Options, device: str) -> None:
    for network in adapter.networks:
        network.compile(dynamic=True)
