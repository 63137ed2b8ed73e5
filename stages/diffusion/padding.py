"""Rows of several lengths in one forward pass: padded, and the padding kept out of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

Tensor = torch.Tensor


def pad_stack(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """`[length, width]` each → `[rows, longest, width]`, and the bool mask `[rows, longest]` of what is no
    padding; None when nothing was padded."""
    lengths = [row.shape[0] for row in rows]
    if len(set(lengths)) == 1:
        return torch.stack(list(rows)), None
    mask = torch.zeros(len(rows), max(lengths), dtype=torch.bool, device=rows[0].device)
    for index, length in enumerate(lengths):
        mask[index, :length] = True
    return pad_sequence(list(rows), batch_first=True), mask


class KeyMask(TorchFunctionMode):
    """Gives every attention inside the block the mask `[rows, keys]` of its number of keys.

    For processors that call attention without a mask: so the rest of their code need not be copied.
    """

    def __init__(self, *masks: Tensor) -> None:
        super().__init__()
        self._masks = {mask.shape[1]: mask[:, None, None, :] for mask in masks}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            kwargs["attn_mask"] = self._masks[args[1].shape[-2]]
        return func(*args, **kwargs)
