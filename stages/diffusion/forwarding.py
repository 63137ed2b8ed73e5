"""Another forward for one module of a loaded network, under its own name and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def replace_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Have calls of `module` run `forward`; the old forward, which it may call.

    The module stays in its place, so that names of parameters, LoRA targets and hooks still fit.
    """
    old = module.forward
    module.forward = forward
    return old
