"""A batch of rows of different lengths, laid end to end: no padding, and no row feels another.

Linear layers see one matrix of all frames. On CPU their result for a frame does not depend on how many
others there are, as long as there are at least `MIN_ROWS` (fewer take another kernel), which is what
makes a request's bits independent of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

MIN_ROWS = 4


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [n, in] → [n, out], the same bits for each row whatever n is."""
    n = x.shape[0]
    if n >= MIN_ROWS:
        return functional.linear(x, weight, bias)
    padded = functional.pad(x, (0, 0, 0, MIN_ROWS - n))
    return functional.linear(padded, weight, bias)[:n]


def per_row(x: Tensor, lengths: Sequence[int], function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function` on each row [n_i, channels] of `x` [Σn, channels], laid end to end again."""
    return torch.cat([function(row) for row in x.split(list(lengths))])
