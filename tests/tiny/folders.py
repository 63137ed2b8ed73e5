"""Tiny checkpoints of diffusers' families."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline

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
    _complete_processor_as_published(folder)


def _enliven(denoiser: torch.nn.Module) -> None:
    """Weights that pass their input on at its own scale, so that prompt and guidance matter."""
    for module in denoiser.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=1 / module.in_features**0.5)


def _complete_processor_as_published(folder: Path) -> None:
    """Its name is the library's, and it comes with settings for films, which the family does not use."""
    index = folder / "model_index.json"
    content = json.loads(index.read_text())
    if "processor" not in content:
        return
    content["processor"] = ["transformers", "Qwen2VLProcessor"]
    index.write_text(json.dumps(content, indent=2))
    film = {"processor_class": "Qwen2VLProcessor", "video_processor_type": "Qwen2VLVideoProcessor"}
    (folder / "processor" / "video_preprocessor_config.json").write_text(json.dumps(film))


def stock_pipeline(family: str) -> Any:
    """The library's own pipeline over the folder, in float32."""
    pipe = DiffusionPipeline.from_pretrained(tiny_folder(family), dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe
