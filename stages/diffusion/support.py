"""Which diffusion family can do what: the table in the README, read off the adapters and the library's
classes that the start-up checks ask too.

`python -m omni_async.stages.diffusion.support` prints it.
"""

from __future__ import annotations

import importlib
from importlib.resources import files
from typing import Any

import diffusers
import yaml

from omni_async.stages.diffusion.adapter import Adapter

FAMILIES = (
    *("qwen_image", "qwen_image_edit", "flux", "flux_kontext", "flux2_klein", "stable_diffusion_3"),
    *("stable_diffusion_xl", "z_image", "sana", "wan", "stable_audio"),
)
HEADER = (
    *("family", "batch", "input images", "LoRA per", "step caches", "attention backends"),
    *("parallel", "own encoder and VAE stages"),
)


def rows() -> list[list[str]]:
    """One row per family, in the order of `HEADER`."""
    return [_row(family) for family in FAMILIES]


def _row(family: str) -> list[str]:
    module: Any = importlib.import_module(f"omni_async.stages.models.{family}.adapter")
    adapter: type[Adapter] = module.Adapter
    network = getattr(diffusers, adapter.network)
    folder = files("omni_async.stages.models").joinpath(family)
    served: dict[str, Any] = yaml.safe_load(folder.joinpath("pipeline.yaml").read_text(encoding="utf-8"))
    image: dict[str, Any] = served.get("image") or {}
    lora = "lora" in image.get("fields", ())
    return [
        served["matches"][0],
        "any sizes" if adapter.pads else "equal sizes",
        _images(image),
        "–" if not lora else "row" if adapter.lora_per_row else "batch",
        "first_block, taylorseer, magcache" if issubclass(network, diffusers.CacheMixin) else "–",
        "yes" if adapter.dispatches_attention else "–",
        _parallel(network),
        "–" if adapter.vae_beside else "yes",
    ]


def _images(image: dict[str, Any]) -> str:
    count = image.get("max_images", 0)
    if not count:
        return "–"
    extras = [name for name in ("strength", "mask_image") if name in image["fields"]]
    needed = "1" if image.get("needs_image") else f"0…{count}"
    return ", ".join([needed, *extras])


def _parallel(network: Any) -> str:
    kinds = [("ulysses, ring", "_cp_plan"), ("tensor", "_tp_plan")]
    return ", ".join(name for name, plan in kinds if getattr(network, plan, None)) or "–"


def markdown() -> str:
    """The table."""
    lines = [HEADER, tuple("---" for _ in HEADER), *rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    print(markdown())
