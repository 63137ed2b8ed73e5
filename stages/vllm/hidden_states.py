"""Hidden states per position, out of a model that vLLM runs.

`capture` lays the rows of each forward pass into a buffer of our own: an operation on tensors that CUDA
graphs record like any other. `HiddenStatesExtension` runs in vLLM's worker and says whose rows they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Rows = tuple[int, NDArray[np.float32]]


class HiddenStatesExtension:
    """Methods that vLLM adds to its worker class; `model_runner` is the worker's."""

    model_runner: Any

    def capture_hidden_states(self, layer: int | None) -> None:
        """Keep the rows of every forward pass from now on: what goes into `layer`, or the last output."""
        runner = self.model_runner
        capture(runner.model, layer, runner.max_num_tokens, runner.dtype, runner.device)

    def pop_hidden_states(self, wanted: list[str]) -> dict[str, Rows]:
        """Of each wanted request in the last step: the position of its first row, and the rows float32
        `[positions, width]`."""
        runner = self.model_runner
        starts = runner.query_start_loc.np
        found: dict[str, Rows] = {}
        for index, request in enumerate(runner.input_batch.req_ids):
            if request in wanted:
                first, last = int(starts[index]), int(starts[index + 1])
                rows = runner.model.omni_rows[first:last].to(torch.float32, copy=True).cpu().numpy()
                found[request] = int(runner.input_batch.num_computed_tokens_cpu[index]), rows
        return found


def capture(model: Any, layer: int | None, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Make `model.forward` leave its rows in `model.omni_rows`, `[tokens, width]`."""
    inner = model.get_language_model().model if hasattr(model, "get_language_model") else model.model
    width = inner.config.hidden_size
    model.omni_rows = torch.zeros(tokens, width, dtype=dtype, device=device)
    if layer is not None:
        inner.aux_hidden_state_layers = (layer,)
    forward = model.forward

    def forward_and_keep(*args: Any, **kwargs: Any) -> Any:
        made = forward(*args, **kwargs)
        hidden, rows = (made[0], made[1][0]) if isinstance(made, tuple) else (made, made)
        model.omni_rows[: len(rows)].copy_(rows)
        return hidden

    model.forward = forward_and_keep
