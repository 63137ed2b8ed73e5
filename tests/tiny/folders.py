"""Tiny checkpoints of diffusers' families."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

from omni_async.stages.models.qwen_image_edit.processor import load as load_processor
from tests.tiny.cache import built_once
from tests.tiny.families import BUILDERS


@cache
def tiny_folder(family: str) -> Path:
    """A diffusers folder of the family."""
    return built_once(family, lambda folder: _build(family, folder))


def _build(family: str, folder: Path) -> None:
    torch.manual_seed(0)
    pipe = BUILDERS[family]()
    _enliven(pipe.unet if family == "stable_diffusion_xl" else pipe.transformer)
    pipe.save_pretrained(folder, safe_serialization=True)
    _name_processor_as_published(folder / "model_index.json")


def _enliven(denoiser: torch.nn.Module) -> None:
    """Weights that pass their input on at its own scale, so that prompt and guidance matter."""
    for module in denoiser.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=1 / module.in_features**0.5)


def _name_processor_as_published(index: Path) -> None:
    content = json.loads(index.read_text())
    if "processor" in content:
        content["processor"] = ["transformers", "Qwen2VLProcessor"]
        index.write_text(json.dumps(content, indent=2))


def stock_pipeline(family: str) -> Any:
    """The library's own pipeline over the folder, in float32."""
    more = {"processor": load_processor(tiny_folder(family))} if family == "qwen_image_edit" else {}
    pipe = DiffusionPipeline.from_pretrained(tiny_folder(family), dtype=torch.float32, **more)
    pipe.set_progress_bar_config(disable=True)
    return pipe
