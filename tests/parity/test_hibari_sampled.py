"""The sampled talker as it is run, beside the network as it is trained."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from safetensors.torch import load_file

from omni_async.stages.models.hibari.autoregressive import GROUPS, TEXT, Autoregressive
from omni_async.stages.models.hibari.sampler import WEIGHTS
from omni_async.stages.models.hibari.step_network import LAYERS, Cache, StepNetwork
from tests.hibari_stages import Floats

STEPS = 150


@cache
def trained() -> Autoregressive:
    net = Autoregressive()
    net.load_state_dict(load_file(WEIGHTS))
    return net.eval()


@cache
def run() -> StepNetwork:
    return StepNetwork(load_file(WEIGHTS))


class Row:
    """Made-up inputs of one sentence, and its caches."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.text = rng.standard_normal((STEPS, 3 * TEXT), np.float32)
        self.elapsed = rng.integers(0, 48, STEPS)
        self.previous = rng.integers(0, 65, (STEPS, GROUPS))
        self.caches = [Cache() for _ in range(LAYERS)]
        self.at = 0


def step(rows: list[Row]) -> Floats:
    """One step of all rows together."""
    logits = run().step(
        np.stack([row.text[row.at] for row in rows]),
        np.array([row.elapsed[row.at] for row in rows]),
        np.stack([row.previous[row.at] for row in rows]),
        [row.caches for row in rows],
        [row.at for row in rows],
    )
    for row in rows:
        row.at += 1
    return logits


def whole(row: Row) -> Floats:
    """All steps at once, as in training."""
    inputs = (torch.as_tensor(array)[None] for array in (row.text, row.elapsed, row.previous))
    with torch.inference_mode():
        moving, codes = trained()(*inputs)
    return torch.cat([moving[0][:, None], codes[0].flatten(1)], 1).numpy()


def test_step_by_step_is_the_trained_network() -> None:
    rows = [Row(seed) for seed in range(3)]
    stepped = np.stack([step(rows) for _ in range(STEPS)], 1)
    for mine, row in zip(stepped, rows, strict=True):
        assert np.abs(mine - whole(row)).max() < 1e-3


def test_a_forgotten_past_would_show() -> None:
    row = Row(0)
    step([row])
    row.caches = [Cache() for _ in range(LAYERS)]
    assert np.abs(step([row])[0] - whole(row)[1]).max() > 0.01


def test_a_row_has_the_same_bits_in_any_batch_and_place() -> None:
    alone = [step([row])[0] for row in [Row(7)] for _ in range(40)]
    for size, place, head_start in ((2, 1, 0), (5, 0, 20), (8, 7, 3), (9, 8, 70), (16, 5, 11)):
        partners, row = [Row(100 + i) for i in range(size - 1)], Row(7)
        for _ in range(head_start):
            step(partners)
        batch = [*partners[:place], row, *partners[place:]]
        together = [step(batch)[place] for _ in range(40)]
        assert np.array_equal(alone, together), f"batch of {size}"


def test_a_product_of_all_rows_at_once_would_not_have_the_same_bits() -> None:
    # What the tiles are there for: the kernel for one row sums in another order.
    rng = np.random.default_rng(0)
    rows, weight = rng.standard_normal((8, 576), np.float32), rng.standard_normal((576, 160), np.float32)
    assert not np.array_equal(rows[:1] @ weight, (rows @ weight)[:1])
