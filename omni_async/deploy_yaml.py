"""One deploy YAML as a tree of mappings: read, its shape and all its keys checked, nothing resolved.

What is refused is named by file and path, with the nearest known key. Ranges and types of the values
are `config.py`'s, checked when a resolved tree becomes a `PipelineConfig`.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml

from omni_async.config import (
    ChatConfig,
    EdgeConfig,
    ImageConfig,
    PipelineConfig,
    SoundConfig,
    SpeechConfig,
    StageConfig,
)
from omni_async.errors import ConfigError

Tree = dict[str, Any]

PLATFORMS = ("cpu", "cuda")
SHARED_MEMORY = "SharedMemoryConnector"
FOLDER_KEYS = ("demo", "matches")
"""Keys of a `pipeline.yaml` under `stages/models/` alone: whether it is served when no MODEL is named,
and the model types and pipeline classes that it serves."""


def read(path: Path, *, folder: bool = False) -> Tree:
    """The checked tree of the file; `folder` when it is a `pipeline.yaml` under `stages/models/`.

    Raises `ConfigError`.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    try:
        return _check(tree, ("base_config", "connectors", "platforms", *(FOLDER_KEYS if folder else ())))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which the second would win unseen."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        pairs = cast(list[tuple[yaml.Node, yaml.Node]], node.value)
        keys = [cast(Any, self).construct_object(key, deep=True) for key, _ in pairs]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} stands twice", node.start_mark)
        return cast(dict[Any, Any], super().construct_mapping(node, deep))


_ANSWERS = {"speech": SpeechConfig, "image": ImageConfig, "sound": SoundConfig, "chat": ChatConfig}


def _check(value: Any, more: Collection[str], path: str = "") -> Tree:
    tree = check_mapping(value, (*_fields(PipelineConfig), *more), path)
    _each_stage(tree, path)
    for index, edge in enumerate(_list(tree, "edges", path)):
        _check_edge(edge, f"{path}edges[{index}]")
    for key, struct in _ANSWERS.items():
        if tree.get(key) is not None:
            check_mapping(tree[key], _fields(struct), f"{path}{key}.")
    if tree.get("platforms") is not None:
        for name, section in check_mapping(tree["platforms"], PLATFORMS, f"{path}platforms.").items():
            _check(section, (), f"{path}platforms.{name}.")
    if tree.get("connectors") is not None:
        _check_connectors(tree["connectors"], f"{path}connectors")
    return tree


def _check_edge(value: Any, path: str) -> None:
    edge = check_mapping(value, (*_fields(EdgeConfig), "from", "to"), f"{path}.")
    for name, other in (("source", "from"), ("target", "to")):
        given = [edge[key] for key in (name, other) if key in edge]
        if len(given) != 1 or not isinstance(given[0], str | int):
            raise ConfigError(f"{path}: needs one {name} (or {other}), a stage's name or stage_id.")


def _each_stage(tree: Tree, path: str) -> None:
    seen: set[Any] = set()
    for index, stage in enumerate(_list(tree, "stages", path)):
        at = f"{path}stages[{index}]"
        number = check_stage(stage, f"{at}.").get("stage_id")
        if not isinstance(number, int):
            raise ConfigError(f"{at}: needs a stage_id, a number.")
        if number in seen:
            raise ConfigError(f"{at}: stage_id {number} stands twice.")
        seen.add(number)


def _list(tree: Tree, key: str, path: str) -> list[Any]:
    if not isinstance(tree.get(key, []), list | None):
        raise ConfigError(f"{path}{key}: must be a list.")
    return listed(tree, key)


def check_stage(value: Any, path: str) -> Tree:
    """`value` if it is a mapping of fields of `StageConfig`; `path` with its closing dot names it."""
    known = _fields(StageConfig)
    stage = check_mapping(value, known, path, "settings of its own engine go into engine_extras")
    inputs = stage.get("inputs", [])
    if not isinstance(stage.get("name", ""), str):
        raise ConfigError(f"{path}name: must be text.")
    if not isinstance(inputs, list) or not all(isinstance(each, str) for each in cast(list[Any], inputs)):
        raise ConfigError(f"{path}inputs: must be a list of names of stages.")
    return stage


def check_mapping(value: Any, known: Collection[str], path: str, otherwise: str = "") -> Tree:
    """`value` if it is a mapping with no key outside of `known`.

    Raises `ConfigError` with the nearest known key, or with `otherwise` where none is near.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{path.rstrip('.') or 'the deploy config'}: must be a mapping.")
    tree = cast(Tree, value)
    for key in tree:
        if key not in known:
            near = get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"{otherwise or 'known: ' + ', '.join(known)}."
            raise ConfigError(f"{path}{key}: unknown key, {hint}")
    return tree


def _check_connectors(value: Any, path: str) -> None:
    if not isinstance(value, dict) or len(cast(Tree, value)) != 1:
        raise ConfigError(f"{path}: must map one label to a connector; stages share one.")
    for label, connector in cast(Tree, value).items():
        tree = check_mapping(connector, ("name", "extra"), f"{path}.{label}.")
        if tree.get("name") != SHARED_MEMORY:
            raise ConfigError(f"{path}.{label}.name: the only connector is {SHARED_MEMORY}.")
        if tree.get("extra") is not None:
            check_mapping(
                tree["extra"],
                ("shm_threshold_bytes",),
                f"{path}.{label}.extra.",
                "settings of a stage go into its engine_extras; known: shm_threshold_bytes",
            )


def _fields(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    return struct.__struct_fields__


def section(tree: Tree, key: str) -> Tree:
    """The mapping under `key`; empty where there is none."""
    return cast(Tree, tree.get(key) or {})


def listed(tree: Tree, key: str) -> list[Tree]:
    """The list of mappings under `key`; empty where there is none."""
    return cast(list[Tree], tree.get(key) or [])


def lay_over(base: Tree, top: Tree) -> Tree:
    """Checked tree `top` over `base`: stages by `stage_id`, mappings key by key, all else replaced.

    Edges are joined; where two are of one pair of stages the later one's settings win.
    """
    merged = merge(base, {key: value for key, value in top.items() if key not in _LAID})
    if "stages" in top:
        stages = {stage["stage_id"]: stage for stage in listed(base, "stages")}
        for stage in listed(top, "stages"):
            stages[stage["stage_id"]] = merge(stages.get(stage["stage_id"], {}), stage)
        merged["stages"] = list(stages.values())
    if "edges" in top:
        merged["edges"] = [*listed(base, "edges"), *listed(top, "edges")]
    if "platforms" in top:
        old, new = section(base, "platforms"), section(top, "platforms")
        laid = {name: lay_over(section(old, name), section(new, name)) for name in new}
        merged["platforms"] = {**old, **laid}
    return merged


_LAID = ("stages", "edges", "platforms")


def merge(base: Tree, top: Tree) -> Tree:
    """`top` over `base`, mappings key by key at every depth; neither is changed."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = merge(cast(Tree, old), cast(Tree, value)) if both else value
    return merged
