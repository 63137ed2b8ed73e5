"""Tiny checkpoints on disk: built once a machine and version of the builders, shared by all test runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline

from omni_async.stages.models.qwen_image_edit.processor import load as load_processor
from tests.tiny.families import BUILDERS


@cache
def tiny_folder(family: str) -> Path:
    """A diffusers folder of the family."""
    folder = _root() / family
    if not folder.exists():
        part = Path(tempfile.mkdtemp(dir=_root(), prefix=f"{family}-"))
        torch.manual_seed(0)
        pipe = BUILDERS[family]()
        _enliven(pipe.unet if family == "stable_diffusion_xl" else pipe.transformer)
        pipe.save_pretrained(part, safe_serialization=True)
        _name_processor_as_published(part / "model_index.json")
        try:
            part.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return folder


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


@cache
def _root() -> Path:
    """One folder per user, version of diffusers and text of the builders."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    digest = hashlib.sha256(sources + diffusers.__version__.encode()).hexdigest()[:12]
    root = Path(tempfile.gettempdir()) / f"omni-tiny-{os.getuid()}-{digest}"
    root.mkdir(mode=0o700, exist_ok=True)
    return root


def stock_pipeline(family: str) -> Any:
    """The library's own pipeline over the folder, in float32."""
    more = {"processor": load_processor(tiny_folder(family))} if family == "qwen_image_edit" else {}
    pipe = DiffusionPipeline.from_pretrained(tiny_folder(family), dtype=torch.float32, **more)
    pipe.set_progress_bar_config(disable=True)
    return pipe
