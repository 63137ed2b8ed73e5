"""The processor that stands in where torchvision is missing, beside the library's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2VLProcessor

from omni_async.stages.models.qwen_image_edit import adapter, processor
from tests.tiny.folders import tiny_folder

PROMPT = "<|vision_start|><|image_pad|><|vision_end|>paint it blue"


def _picture() -> Image.Image:
    """Smooth, as photographs are: resampling kernels agree on it."""
    across, down = np.meshgrid(np.linspace(0, 255, 112), np.linspace(0, 255, 84))
    return Image.fromarray(np.stack([across, down, 255 - across], axis=-1).astype(np.uint8))


def test_tokens_are_the_librarys_and_patches_differ_by_less_than_a_level() -> None:
    folder = tiny_folder("qwen_image_edit")
    library: Any = Qwen2VLProcessor.from_pretrained(folder / "processor")
    inputs: dict[str, Any] = {"text": [PROMPT], "images": [_picture()], "return_tensors": "pt"}
    stand_in: Any = processor.load(folder)
    expected, got = library(**inputs), stand_in(**inputs)
    assert set(got) <= set(expected)
    for name in ("input_ids", "attention_mask", "image_grid_thw"):
        assert torch.equal(got[name], expected[name]), name
    levels = 255 * 0.27  # one standard deviation of the normalised pixels, in 8-bit levels
    assert (got["pixel_values"] - expected["pixel_values"]).abs().max() * levels < 1.5
    turned = stand_in(**(inputs | {"images": [_picture().rotate(180)]}))
    assert (turned["pixel_values"] - expected["pixel_values"]).abs().max() * levels > 100


def test_only_a_machine_without_torchvision_gets_it(monkeypatch: Any) -> None:
    folder = tiny_folder("qwen_image_edit")
    assert adapter.components(folder) == {}
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    assert isinstance(adapter.components(folder)["processor"], processor.PictureProcessor)
