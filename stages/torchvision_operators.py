"""torchvision beside a build of torch that it was not compiled for.

Processors of pictures and films resize with torch alone, but importing torchvision asks for its compiled
operators, which concern boxes. Declared without a body they let the import pass; a call of one still fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "_roi_align_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "deform_conv2d",
    "_deform_conv2d_backward",
)

_libraries: list[Any] = []


def declared() -> bool:
    """Whether this process had to declare the operators: its children will fail without it."""
    return bool(_libraries)


def make_torchvision_importable() -> None:
    """Import torchvision if it is installed; where its operators do not load, declare them before that."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        _declare()
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        importlib.import_module("torchvision")


def _declare() -> None:
    from torch.library import Library

    library: Any = Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor x) -> Tensor")
    _libraries.append(library)
