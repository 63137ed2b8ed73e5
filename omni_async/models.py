"""Finding what a MODEL names: a built-in pipeline, a local folder, or a Hugging Face id.

Each folder under `stages/models/` has a `pipeline.yaml`, whose `matches` lists the model types and
pipeline classes that it serves, and whose `demo: true` makes it part of `omni-async serve` without a
MODEL. There is no central list.
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from omni_async.errors import ConfigError

CONFIG_FILES = ("model_index.json", "config.json")


def catalogue() -> dict[str, dict[str, Any]]:
    """The `pipeline.yaml` of every model folder, by folder name."""
    folders = Path(str(files("omni_async.stages.models"))).iterdir()
    found = sorted(path for folder in folders if (path := folder / "pipeline.yaml").is_file())
    return {path.parent.name: yaml.safe_load(path.read_text()) for path in found}


def demo_models() -> list[str]:
    """The folders that are served when no MODEL is named."""
    return [name for name, content in catalogue().items() if content.get("demo")]


def find(model: str) -> tuple[str, str]:
    """The folder under `stages/models/` that serves `model`, and the weights' place ("" for built in).

    Raises `ConfigError` for a model that is not here or that no folder serves.
    """
    known = catalogue()
    if model in known:
        return model, ""
    names = _declared_names(model)
    for folder, content in known.items():
        if set(names) & {folder, *content.get("matches", ())}:
            return folder, model
    raise ConfigError(f"No folder under stages/models serves {model} ({', '.join(names)}).")


def _declared_names(model: str) -> list[str]:
    """What the model's own config says it is."""
    for name in CONFIG_FILES:
        if (path := _config_path(model, name)) is not None:
            content = json.loads(path.read_text())
            declared = [content.get("_class_name"), content.get("model_type")]
            return [str(n) for n in (*declared, *content.get("architectures", ())) if n]
    near = get_close_matches(model, catalogue(), 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"{model} is neither a built-in model ({', '.join(catalogue())}) nor a folder or Hugging Face id "
        f"with {' or '.join(CONFIG_FILES)}.{hint}"
    )


def _config_path(model: str, name: str) -> Path | None:
    local = Path(model)
    if local.is_dir():
        return local / name if (local / name).is_file() else None
    return _from_hub(model, name)


def _from_hub(model: str, name: str) -> Path | None:
    if model.count("/") != 1 or model.startswith((".", "/")):
        return None
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"{model} looks like a Hugging Face id; install an extra that fetches such models, for example "
            "omni_async[diffusion]."
        ) from None
    try:
        return Path(hf_hub_download(model, name))
    except (HfHubHTTPError, LocalEntryNotFoundError):
        return None
