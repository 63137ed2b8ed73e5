"""LoRA adapters of single requests, several of them in one batch: loaded, switched and dropped by peft."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from omni_async.errors import InvalidRequest, Overloaded
from omni_async.stages.diffusion.spec import LoraSpec

BASE = "__base__"
"""peft's name for a row without adapter."""

Key = tuple[str, int, float]


class Loras:
    """The adapters of one pipeline, at most `limit` loaded; those that no request uses make room.

    An adapter and a weight form one entry, since peft keeps one weight per loaded adapter. Rows without an
    adapter run as if none were loaded, bit for bit when no row of their batch has one.
    """

    def __init__(self, pipe: Any, denoiser: torch.nn.Module, limit: int = 8) -> None:
        self._pipe = pipe
        self._denoiser = denoiser
        self.limit = limit
        self._names: dict[Key, str] = {}
        self._users: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._active: dict[int, str] = {}
        self._rows: list[str] | None = None
        self._hooked: set[int] = set()

    def use(self, spec: LoraSpec) -> str:
        """The name of the adapter, loaded; pair with `release`.

        Raises `InvalidRequest` when there is none, `Overloaded` when `limit` others are in use.
        """
        path = Path(spec.path)
        if not path.exists():
            raise InvalidRequest(f"There is no file of {spec.name}.", param="lora.path")
        key = (str(path.resolve()), path.stat().st_mtime_ns, spec.scale)
        name = self._names.pop(key, None) or self._load(path, spec)
        self._names[key] = name
        self._users[name] = self._users.get(name, 0) + 1
        return name

    def release(self, name: str) -> None:
        """A request that used `name` has ended."""
        if name:
            self._users[name] -= 1

    def _load(self, path: Path, spec: LoraSpec) -> str:
        self._make_room()
        name = f"lora{next(self._numbers)}"
        try:
            self._pipe.load_lora_weights(str(path), adapter_name=name, use_safetensors=True)
        except Exception as error:
            self._forget(name)
            message = f"{spec.name} is no LoRA of this model: {type(error).__name__}: {error}"
            raise InvalidRequest(message, param="lora") from error
        if not self._holders(name):
            raise InvalidRequest(f"{spec.name} has no weights for this model.", param="lora")
        for holder in self._holders(name):
            for layer in holder.modules():
                if isinstance(layer, LoraLayer) and name in layer.scaling:
                    layer.set_scale(name, spec.scale)
        self._active.clear()
        self._hook()
        return name

    def _holders(self, name: str) -> list[Any]:
        """The components that `name` changes."""
        parts = self._pipe.components.values()
        return [part for part in parts if name in (getattr(part, "peft_config", None) or {})]

    def _make_room(self) -> None:
        if len(self._names) < self.limit:
            return
        idle = next((key for key, name in self._names.items() if not self._users[name]), None)
        if idle is None:
            message = f"{self.limit} LoRA adapters are in use, as many as may be loaded (max_loras)."
            raise Overloaded(message, retry_after=5.0)
        self._forget(self._names.pop(idle))

    def _forget(self, name: str) -> None:
        self._users.pop(name, None)
        self._active.clear()
        if self._holders(name):
            self._pipe.delete_adapters(name)

    def _hook(self) -> None:
        """Have every LoRA layer of the denoiser ask for the rows of the forward pass."""
        for layer in self._denoiser.modules():
            if isinstance(layer, LoraLayer) and id(layer) not in self._hooked:
                self._hooked.add(id(layer))
                layer.register_forward_pre_hook(self._add_rows, with_kwargs=True)

    def _add_rows(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs if self._rows is None else {**kwargs, "adapter_names": self._rows}

    def activate(self, names: Sequence[str]) -> None:
        """Have the next forward passes of the denoiser run row i with adapter `names[i]` ("": none)."""
        if not self._names:
            return
        same = len(set(names)) == 1
        self._rows = None if same else [name or BASE for name in names]
        if same:
            self._switch(self._denoiser, names[0])
        else:
            self._switch(self._denoiser, next(filter(None, names)))

    def activate_texts(self, name: str) -> None:
        """Have the text encoders run with adapter `name` ("": none)."""
        for part in self._pipe.components.values():
            if part is not self._denoiser and getattr(part, "peft_config", None):
                self._switch(part, name if name in part.peft_config else "")

    def _switch(self, part: Any, name: str) -> None:
        if self._active.get(id(part)) == name:
            return
        for layer in part.modules():
            if isinstance(layer, LoraLayer):
                layer.enable_adapters(enabled=bool(name))
                if name in layer.lora_A:
                    layer.set_adapter(name)
                elif name:
                    layer.enable_adapters(enabled=False)
        self._active[id(part)] = name
