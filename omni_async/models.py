"""Finding what a MODEL names: a built-in pipeline, a local folder, or a Hugging Face id.

Each folder under `stages/models/` has a `pipeline.yaml`, whose `matches` lists the model types and
pipeline classes that it serves beside its own name, and whose `demo: true` makes it part of
`omni-async serve` without a MODEL. There is no central list, and nothing of a model is imported here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

from omni_async import deploy_yaml
from omni_async.errors import ConfigError

CONFIG_FILES = ("model_index.json", "config.json")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class Found(NamedTuple):
    """What a MODEL is: the folder under `stages/models/` that serves it (None: none does), where its
    weights are ("": the folder's own), and what its config says it is."""

    folder: str | None
    weights: str = ""
    names: tuple[str, ...] = ()


def catalogue() -> dict[str, dict[str, Any]]:
    """The `pipeline.yaml` of every model folder, by folder name."""
    paths = sorted(
        path for folder in _root("models").iterdir() if (path := folder / "pipeline.yaml").is_file()
    )
    return {path.parent.name: deploy_yaml.read(path, folder=True) for path in paths}


def folder_of(name: str) -> Path:
    """Where the model folder `name` lies."""
    return _root("models") / name


def demo_models() -> list[str]:
    """The folders that are served when no MODEL is named."""
    return [name for name, content in catalogue().items() if content.get("demo")]


def kinds(model_arch: str) -> list[str]:
    """The names that a stage of `model_arch` may give as its kind: modules of its folder and of
    `stages/kinds/`."""
    folders = [_root("models") / model_arch, _root("kinds")] if model_arch else [_root("kinds")]
    paths = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return sorted({path.stem for path in paths if path.suffix == ".py" and not path.stem.startswith("_")})


def _root(name: str) -> Path:
    return Path(str(files(f"omni_async.stages.{name}")))


def find(model: str) -> Found:
    """What `model` names. Raises `ConfigError` when there is no such thing, or two folders serve it."""
    known = catalogue()
    if model in known:
        return Found(folder=model)
    names = _declared_names(model, list(known))
    wanted = set(map(_plain, names))
    serving = [
        folder
        for folder, content in known.items()
        if wanted & set(map(_plain, (folder, *content.get("matches", ()))))
    ] or [folder for folder, content in known.items() if _serves_any(content, names)]
    if len(serving) > 1:
        raise ConfigError(f"{model} ({', '.join(names)}) is served by several folders: {', '.join(serving)}.")
    return Found(serving[0] if serving else None, model, tuple(names))


def _serves_any(content: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether one of `matches` is a pattern, as `*Pipeline`, that fits: it serves what no other does."""
    patterns = [match for match in content.get("matches", ()) if "*" in match]
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def _declared_names(model: str, known: list[str]) -> list[str]:
    """What the model's own config says it is, the most telling name first."""
    path = _config_in(Path(model)) or (_config_from_hub(model) if HUB_ID.fullmatch(model) else None)
    if path is not None:
        return _names_in(path)
    near = get_close_matches(model, known, 1)
    hint = f" Did you mean {near[0]}?" if near else f" Built in: {', '.join(known)}."
    raise ConfigError(
        f"{model} is neither a built-in model, nor a folder or Hugging Face id with "
        f"{' or '.join(CONFIG_FILES)}.{hint}"
    )


def _names_in(path: Path) -> list[str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a JSON object.")
    config = cast(dict[str, Any], content)
    declared = [config.get("_class_name"), *(config.get("architectures") or ()), config.get("model_type")]
    return [str(name) for name in declared if name]


def _config_in(folder: Path) -> Path | None:
    return next((path for name in CONFIG_FILES if (path := folder / name).is_file()), None)


def _config_from_hub(model: str) -> Path | None:
    """The config of a Hugging Face model: from the cache if it is there, else fetched."""
    try:
        from huggingface_hub import (
            hf_hub_download,  # pyright: ignore[reportUnknownVariableType]
            try_to_load_from_cache,
        )
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(
            f"{model} looks like a Hugging Face id; install an extra that fetches such models, for example "
            "omni_async[diffusion]."
        ) from None
    for name in CONFIG_FILES:
        if isinstance(cached := try_to_load_from_cache(model, name), str):
            return Path(cached)
    for name in CONFIG_FILES:
        try:
            return Path(hf_hub_download(model, name))
        except LocalEntryNotFoundError:
            message = f"{model} is not on this machine, and the Hugging Face hub does not answer."
            raise ConfigError(message) from None
        except HfHubHTTPError:
            continue
    return None
