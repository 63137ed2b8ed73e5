"""The sampled talker's network, run step by step: the same as `Autoregressive`, in numpy.

One step of 25 ms is some forty products of small matrices, where torch spends most of its time around
the products; here a step of eight sentences takes about a millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from omni_async.stages.models.hibari.autoregressive import GROUPS, Autoregressive, Codes
from omni_async.stages.models.hibari.spectra import Floats

WIDTH, HEADS, LAYERS = Autoregressive.WIDTH, Autoregressive.HEADS, Autoregressive.LAYERS
HEAD_WIDTH = WIDTH // HEADS
EPSILON = 1e-5

TILE = 8
"""Products see this many rows at a time, the last ones padded: the kernel, and with it every bit of a row,
is then the same whatever the batch."""


class Cache:
    """Keys [heads, width, steps] and values [heads, steps, width] of one sentence in one layer, grown by
    doubling."""

    def __init__(self) -> None:
        self._keys: Floats = np.zeros((HEADS, HEAD_WIDTH, 128), np.float32)
        self._values: Floats = np.zeros((HEADS, 128, HEAD_WIDTH), np.float32)

    def attend(self, at: int, query: Floats, key: Floats, value: Floats) -> Floats:
        """Store step `at` and give what its query [heads, width] finds in it and all before, [160].

        Safe to run again for the same step.
        """
        if at == self._values.shape[1]:
            self._keys = np.concatenate([self._keys, np.zeros_like(self._keys)], 2)
            self._values = np.concatenate([self._values, np.zeros_like(self._values)], 1)
        self._keys[:, :, at], self._values[:, at] = key, value
        scores = query[:, None] @ self._keys[:, :, : at + 1]
        scores -= scores.max(2, keepdims=True)
        weights = np.exp(scores, out=scores)
        found = weights @ self._values[:, : at + 1]
        found /= weights.sum(2, keepdims=True)
        return found.reshape(WIDTH)


class StepNetwork:
    """The weights, and one step of a ragged batch."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights: dict[str, Floats] = {name: tensor.numpy() for name, tensor in weights.items()}
        for name, array in self._weights.items():
            if array.ndim == 2 and not name.startswith(("elapsed", "previous")):
                self._weights[name] = np.ascontiguousarray(array.T)

    def step(
        self,
        text: Floats,
        elapsed: NDArray[np.int64],
        previous: Codes,
        caches: Sequence[Sequence[Cache]],
        at: Sequence[int],
    ) -> Floats:
        """Per row the encoder vectors [n, 576], the steps on the phoneme [n], the codes of the step before
        [n, 4], its caches and its position → logits [n, 1 + 4·64]."""
        x = self._linear("text", text) + self._weights["elapsed.weight"][elapsed]
        for group in range(GROUPS):
            x += self._weights[f"previous.{group}.weight"][previous[:, group]]
        for layer in range(LAYERS):
            x += self._attention(f"blocks.{layer}", x, [row[layer] for row in caches], at)
            x += self._hidden(f"blocks.{layer}", x)
        return self._linear("head", self._norm("norm", x))

    def _attention(self, name: str, x: Floats, caches: Sequence[Cache], at: Sequence[int]) -> Floats:
        mixed = self._linear(f"{name}.attention_in", self._norm(f"{name}.attention_norm", x))
        parts = mixed.reshape(-1, 3, HEADS, HEAD_WIDTH)
        parts[:, 0] *= HEAD_WIDTH**-0.5
        found = [cache.attend(position, *row) for cache, position, row in zip(caches, at, parts, strict=True)]
        return self._linear(f"{name}.attention_out", np.stack(found))

    def _hidden(self, name: str, x: Floats) -> Floats:
        hidden = self._linear(f"{name}.hidden_in", self._norm(f"{name}.hidden_norm", x))
        return self._linear(f"{name}.hidden_out", functional.gelu(torch.as_tensor(hidden)).numpy())

    def _norm(self, name: str, x: Floats) -> Floats:
        centred = x - x.mean(1, keepdims=True)
        variance = np.einsum("ij,ij->i", centred, centred)[:, None] / WIDTH
        centred /= np.sqrt(variance + EPSILON)
        centred *= self._weights[f"{name}.weight"]
        centred += self._weights[f"{name}.bias"]
        return centred

    def _linear(self, name: str, x: Floats) -> Floats:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        rows = len(x)
        padded = np.zeros((-(-rows // TILE) * TILE, x.shape[1]), np.float32)
        padded[:rows] = x
        products = [padded[start : start + TILE] @ weight for start in range(0, len(padded), TILE)]
        whole = products[0] if len(products) == 1 else np.concatenate(products)
        return whole[:rows] + bias
