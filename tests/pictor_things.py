"""Recognising what the built-in picture model drew: the nearest of 984 pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
NAMES = (ROOT / "examples/train_pictor/things.txt").read_text().splitlines()
SHEET = ROOT / "tests/parity/pictor_things.png"
COLUMNS, SIDE, ALL = 32, 32, 984


@cache
def references() -> NDArray[np.float32]:
    """984 pictures, `[n, 32 · 32 · 3]` in [0, 1]; the first are those of the 207 things, in their order."""
    sheet = np.asarray(Image.open(SHEET), np.float32) / 255
    tiles = sheet.reshape(-1, SIDE, COLUMNS, SIDE, 3).swapaxes(1, 2).reshape(-1, SIDE * SIDE * 3)
    return tiles[:ALL].astype(np.float32)


def nearest(pictures: Sequence[NDArray[np.uint8]]) -> list[int]:
    """For each picture (a multiple of 32 pixels wide and high) the number of the nearest reference."""
    small = [p.reshape(32, p.shape[0] // 32, 32, -1, 3).mean((1, 3)).reshape(-1) for p in pictures]
    mine, theirs = np.stack(small) / 255, references()
    distances = (mine**2).sum(1)[:, None] - 2 * mine @ theirs.T + (theirs**2).sum(1)
    return [int(index) for index in distances.argmin(1)]
