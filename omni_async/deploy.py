"""From a deploy YAML, overrides and flags to a `Deployment`.

Precedence: per-stage flag > `stage_overrides` > YAML > defaults. `base_config` names a YAML (or a
built-in model) that this one lays itself over, stage by stage. An unknown key is refused with its
path and the nearest known name.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import yaml

from omni_async import models
from omni_async.config import Deployment, EdgeConfig, PipelineConfig, ServerConfig, SpeechConfig, StageConfig
from omni_async.environment import platform
from omni_async.errors import ConfigError
from omni_async.graph import StageGraph

Tree = dict[str, Any]
Overrides = Mapping[str, Mapping[str, Any]]

YAML_ONLY = {"base_config", "connectors", "platforms", "demo", "matches"}
"""Keys of a deploy YAML that are used up here and are no fields of `PipelineConfig`."""

SHARED_MEMORY = "SharedMemoryConnector"


def load(
    *,
    model: str | None = None,
    deploy_config: str | Path | None = None,
    stage_overrides: Overrides | None = None,
    stage_flags: Overrides | None = None,
    server: ServerConfig | None = None,
) -> Deployment:
    """Everything resolved. Without `model` and `deploy_config`: the built-in demo pipelines.

    `stage_overrides` and `stage_flags` map a stage_id (as text) to fields of `StageConfig`. Raises
    `ConfigError`.
    """
    trees = _trees(model, deploy_config)
    if len(trees) > 1 and (stage_overrides or stage_flags):
        raise ConfigError("Stage overrides need one MODEL or --deploy-config to apply to.")
    for overrides in (stage_overrides or {}, stage_flags or {}):
        for tree in trees:
            _override(tree, overrides)
    pipelines = tuple(_pipeline(tree) for tree in trees)
    _refuse_shared_names(pipelines)
    return Deployment(pipelines=pipelines, server=server or ServerConfig())


def _trees(model: str | None, deploy_config: str | Path | None) -> list[Tree]:
    if deploy_config is not None:
        tree = _read(Path(deploy_config))
        weights = "" if model is None or model in models.catalogue() else model
        return [_with_weights(tree, weights)]
    if model is not None:
        folder, weights = models.find(model)
        return [_with_weights(_built_in(folder), weights)]
    return [_built_in(name) for name in models.demo_models()]


def _built_in(folder: str) -> Tree:
    tree = deepcopy(models.catalogue()[folder])
    tree.setdefault("model_arch", folder)
    return tree


def _read(path: Path, seen: tuple[Path, ...] = ()) -> Tree:
    """A YAML laid over its `base_config`, if it has one."""
    if path.resolve() in seen:
        raise ConfigError(f"{path}: base_config leads back to itself.")
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must be a mapping.")
    base = tree.pop("base_config", None)
    if base is None:
        return tree
    return _lay_over(_base(str(base), path, (*seen, path.resolve())), tree)


def _base(base: str, path: Path, seen: tuple[Path, ...]) -> Tree:
    if base in models.catalogue():
        return _built_in(base)
    return _read(path.parent / base, seen)


def _lay_over(base: Tree, top: Tree) -> Tree:
    """`top` over `base`: mappings key by key, stages by `stage_id`, all else replaced."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        if key == "stages" and isinstance(old, list) and isinstance(value, list):
            merged[key] = _lay_stages(old, value)
        elif isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _lay_over(old, value)
        else:
            merged[key] = value
    return merged


def _lay_stages(base: list[Tree], top: list[Tree]) -> list[Tree]:
    by_id = {stage.get("stage_id"): stage for stage in base}
    for stage in top:
        number = stage.get("stage_id")
        by_id[number] = _lay_over(by_id.get(number, {}), stage)
    return list(by_id.values())


def _with_weights(tree: Tree, weights: str) -> Tree:
    if weights:
        for stage in tree.get("stages", []):
            stage.setdefault("model", weights)
    return tree


def _override(tree: Tree, overrides: Overrides) -> None:
    stages = {str(stage.get("stage_id")): stage for stage in tree.get("stages", [])}
    for number, fields in overrides.items():
        if number not in stages:
            raise ConfigError(f"There is no stage {number}; the stages are {', '.join(stages)}.")
        stages[number].update(fields)


def _pipeline(tree: Tree) -> PipelineConfig:
    """The tree as a checked `PipelineConfig`."""
    tree = _for_platform(tree)
    _refuse_unknown(tree, PipelineConfig, "", YAML_ONLY)
    connectors = tree.get("connectors") or {}
    fields = {key: value for key, value in tree.items() if key not in YAML_ONLY}
    fields["stages"] = [_stage(stage, tree, i) for i, stage in enumerate(tree.get("stages", []))]
    fields["edges"] = _edges(fields["stages"], tree)
    if isinstance(speech := fields.get("speech"), dict):
        _refuse_unknown(speech, SpeechConfig, "speech.")
    limit = _inline_limit(connectors)
    if limit is not None:
        for stage in fields["stages"]:
            stage.setdefault("inline_limit", limit)
    pipeline = _convert(fields, PipelineConfig)
    StageGraph.from_pipeline(pipeline)
    return pipeline


def _for_platform(tree: Tree) -> Tree:
    platforms = tree.get("platforms") or {}
    if unknown := set(platforms) - {"cpu", "cuda"}:
        raise ConfigError(f"platforms.{sorted(unknown)[0]}: unknown platform; known are cpu and cuda.")
    return _lay_over(tree, platforms.get(platform(), {}))


def _stage(stage: Tree, tree: Tree, index: int) -> Tree:
    _refuse_unknown(stage, StageConfig, f"stages[{index}].")
    filled = {"model_arch": tree.get("model_arch", ""), **stage}
    if isinstance(filled.get("devices"), str):
        filled["devices"] = [filled["devices"]]
    return filled


def _edges(stages: list[Tree], tree: Tree) -> list[Tree]:
    """The edges named in the YAML; where `async_chunk` is false, all of them, and whole."""
    edges: dict[tuple[Any, Any], Tree] = {}
    for index, edge in enumerate(tree.get("edges") or []):
        named = {{"from": "source", "to": "target"}.get(key, key): value for key, value in edge.items()}
        _refuse_unknown(named, EdgeConfig, f"edges[{index}].")
        named = {key: _stage_name(value, stages) if key in ("source", "target") else value for key, value in named.items()}
        edges[named.get("source"), named.get("target")] = named
    if tree.get("async_chunk", True) is False:
        for stage in stages:
            for source in stage.get("inputs", ()):
                key = (source, stage.get("name"))
                edges[key] = {"source": key[0], "target": key[1], **edges.get(key, {}), "window_size": -1}
    return list(edges.values())


def _stage_name(value: Any, stages: list[Tree]) -> Any:
    """Edges may name a stage by its stage_id."""
    return next((s.get("name") for s in stages if s.get("stage_id") == value), value)


def _inline_limit(connectors: Tree) -> int | None:
    """What a shared-memory connector says about how large a chunk must be to use it, in bytes."""
    limit = None
    for label, connector in connectors.items():
        if not isinstance(connector, dict) or connector.get("name") != SHARED_MEMORY:
            raise ConfigError(f"connectors.{label}: only {SHARED_MEMORY} is available.")
        extra = connector.get("extra") or {}
        if unknown := (set(connector) - {"name", "extra"}) | (set(extra) - {"shm_threshold_bytes"}):
            raise ConfigError(f"connectors.{label}.{sorted(unknown)[0]}: unknown key.")
        limit = extra.get("shm_threshold_bytes", limit)
    return limit


def _refuse_unknown(tree: Any, struct: type[msgspec.Struct], path: str, more: set[str] | None = None) -> None:
    if not isinstance(tree, dict):
        raise ConfigError(f"{path.rstrip('.') or 'the deploy config'}: must be a mapping.")
    known = {field.name for field in msgspec.structs.fields(struct)} | (more or set())
    for key in tree:
        if key not in known:
            near = get_close_matches(str(key), known, 1)
            hint = f", did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}."
            raise ConfigError(f"{path}{key}: unknown key{hint}")


def _convert(tree: Tree, struct: type[PipelineConfig]) -> PipelineConfig:
    try:
        return msgspec.convert(tree, struct)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The deploy config is wrong: {error}") from None


def _refuse_shared_names(pipelines: tuple[PipelineConfig, ...]) -> None:
    seen: dict[str, str] = {}
    for pipeline in pipelines:
        for name in (pipeline.name, *pipeline.aliases):
            if name in seen:
                raise ConfigError(f"{pipeline.name} and {seen[name]} both answer to {name!r}.")
            seen[name] = pipeline.name
