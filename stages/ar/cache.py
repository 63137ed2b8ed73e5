"""A ragged cache of keys and values: many requests of different lengths, one slot each.

The rows of a step are picked by slot, so that requests join and leave without anything being moved. A
`View` stands where transformers' attention layers expect their `Cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FIRST_CAPACITY = 256
"""Positions a slot has at first; twice as many whenever a request outgrows them."""


class RaggedCache:
    """Keys and values `[slots, heads, positions, head_dim]` for each of `layers` layers."""

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: str,
        capacity: int = FIRST_CAPACITY,
    ) -> None:
        self.capacity = capacity
        shape = (slots, heads, capacity, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._free = list(range(slots))

    def take(self) -> int:
        """A free slot, the lowest: rows that lie side by side are read without being gathered."""
        return self._free.pop(0)

    def give(self, slot: int) -> None:
        """The slot is free again."""
        self._free.append(slot)
        self._free.sort()

    def view(self, slots: Sequence[int], starts: Sequence[int], count: int = 1) -> View:
        """For a forward pass of `count` positions a row: row i has slot `slots[i]` and begins at position
        `starts[i]`. Several rows have one position each."""
        if len(slots) > 1 and count > 1:
            raise ValueError("rows that share a pass have one position each")
        self._reserve(max(starts) + count)
        return View(self, slots, starts, count)

    def _reserve(self, positions: int) -> None:
        if positions <= self.capacity:
            return
        while self.capacity < positions:
            self.capacity *= 2
        for kept in (self.keys, self.values):
            for layer, old in enumerate(kept):
                slots, heads, used, head_dim = old.shape
                kept[layer] = old.new_zeros((slots, heads, self.capacity, head_dim))
                kept[layer][:, :, :used] = old


class View:
    """The rows of one forward pass. `mask` is bool `[rows, 1, count, longest]`."""

    def __init__(self, cache: RaggedCache, slots: Sequence[int], starts: Sequence[int], count: int) -> None:
        self._cache = cache
        self._count = count
        self.longest = max(starts) + count
        device = cache.keys[0].device
        self._starts = torch.tensor(starts, device=device)
        self._rows = torch.tensor(slots, device=device)
        together = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        self._read: Any = slice(slots[0], slots[0] + len(slots)) if together else self._rows
        steps = torch.arange(count, device=device)
        upto = (self._starts[:, None] + steps)[:, None, :, None]
        self.mask = torch.arange(self.longest, device=device) <= upto

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new `[rows, heads, count, head_dim]` of a layer; what its rows may look at."""
        return self._write(self._cache.keys[layer_idx], keys), self._write(
            self._cache.values[layer_idx], values
        )

    def _write(self, kept: Tensor, new: Tensor) -> Tensor:
        if self._count == 1:
            kept[self._rows, :, self._starts] = new[:, :, 0]
        else:
            kept[self._rows[0], :, self.longest - self._count : self.longest] = new[0]
        return kept[self._read, :, : self.longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions of the longest row before this pass."""
        return self.longest - self._count
