"""From MODEL, a deploy YAML, overrides and flags to a `Deployment`.

Precedence: per-stage flag > `stage_overrides` > the platform's section > YAML > its `base_config` > the
pipeline of MODEL > defaults. What a file may say is checked in `deploy_yaml.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import msgspec

from omni_async import models
from omni_async.config import Deployment, PipelineConfig, ServerConfig
from omni_async.deploy_yaml import FOLDER_KEYS, Tree, check_stage, lay_over, listed, merge, read, section
from omni_async.environment import platform
from omni_async.errors import ConfigError
from omni_async.graph import StageGraph

Overrides = Mapping[str, Mapping[str, Any]]

DEVICE = re.compile(r"cpu|cuda(:\d+)?")


def load(
    *,
    model: str | None = None,
    deploy_config: str | Path | None = None,
    stage_overrides: Overrides | None = None,
    stage_flags: Overrides | None = None,
    server: ServerConfig | None = None,
) -> Deployment:
    """Everything resolved. Without `model` and `deploy_config`: the built-in demo pipelines.

    A `deploy_config` is laid over the pipeline of `model`, if there is one, or stands alone.
    `stage_overrides` and `stage_flags` map a stage_id (as text) to fields of `StageConfig`. Raises
    `ConfigError`.
    """
    trees = [_for_platform(tree) for tree in _trees(model, deploy_config)]
    if len(trees) > 1 and (stage_overrides or stage_flags):
        raise ConfigError("Stage overrides need one MODEL or --deploy-config to apply to.")
    for overrides in (stage_overrides or {}, stage_flags or {}):
        trees = [_override(tree, overrides) for tree in trees]
    if server is not None and server.deterministic:
        trees = [_deterministic(tree) for tree in trees]
    pipelines = tuple(map(_pipeline, trees))
    _refuse_shared_names(pipelines)
    return Deployment(pipelines=pipelines, server=_checked(server or ServerConfig()))


def _trees(model: str | None, deploy_config: str | Path | None) -> list[Tree]:
    if model is None and deploy_config is None:
        demos = [_built_in(name) for name in models.demo_models()]
        if not demos:
            raise ConfigError(f"Name a MODEL or --deploy-config; built in: {', '.join(models.catalogue())}.")
        return demos
    if model is None:
        return [_with_base(Path(str(deploy_config)), {})]
    found = models.find(model)
    if found.folder is None and deploy_config is None:
        names = ", ".join(found.names) or "nothing"
        raise ConfigError(f"No folder under stages/models serves {model}, which says it is {names}.")
    tree = {} if found.folder is None else _built_in(found.folder)
    if deploy_config is not None:
        tree = _with_base(Path(deploy_config), tree)
    if found.weights:
        for stage in listed(tree, "stages"):
            stage.setdefault("model", found.weights)
        # Callers know it by the name that it was started by.
        tree["aliases"] = [*tree.get("aliases", ()), found.weights]
    return [tree]


def _built_in(folder: str) -> Tree:
    tree = {key: value for key, value in models.catalogue()[folder].items() if key not in FOLDER_KEYS}
    tree = {"model_arch": folder, **deepcopy(tree)}
    for stage in listed(tree, "stages"):
        if str(stage.get("model", "")).startswith("./"):
            stage["model"] = str(models.folder_of(folder) / stage["model"])
    return tree


def _with_base(path: Path, lowest: Tree, seen: tuple[Path, ...] = ()) -> Tree:
    """The file over its `base_config` (a path beside it, or a built-in name), that over `lowest`."""
    if path.resolve() in seen:
        raise ConfigError(f"{path}: base_config leads back to itself.")
    tree = read(path)
    base = tree.pop("base_config", None)
    if base is None:
        return lay_over(lowest, tree)
    if base not in models.catalogue():
        return lay_over(_with_base(path.parent / str(base), lowest, (*seen, path.resolve())), tree)
    if lowest:
        raise ConfigError(f"{path}: base_config {base} and MODEL both name a pipeline; leave one out.")
    return lay_over(_built_in(base), tree)


def _for_platform(tree: Tree) -> Tree:
    here = section(section(tree, "platforms"), platform())
    return lay_over({key: value for key, value in tree.items() if key != "platforms"}, here)


def _override(tree: Tree, overrides: Overrides) -> Tree:
    known = [str(stage["stage_id"]) for stage in listed(tree, "stages")]
    layer: list[Tree] = []
    for number, fields in overrides.items():
        if number not in known:
            raise ConfigError(f"There is no stage {number}; the stages are {', '.join(known) or 'none'}.")
        if "stage_id" in fields:
            raise ConfigError(f"Stage {number}: stage_id says which stage is meant and cannot be changed.")
        layer.append({"stage_id": int(number), **check_stage(dict(fields), f"stage {number}: ")})
    return lay_over(tree, {"stages": layer})


def _deterministic(tree: Tree) -> Tree:
    return {**tree, "stages": [{**stage, "deterministic": True} for stage in listed(tree, "stages")]}


def _pipeline(tree: Tree) -> PipelineConfig:
    """The tree as a checked `PipelineConfig`."""
    fields = {key: value for key, value in tree.items() if key != "connectors" and value is not None}
    edges = [_edge(edge, tree) for edge in listed(tree, "edges")]
    fields["stages"] = [_stage(stage, tree, edges) for stage in listed(tree, "stages")]
    fields["edges"] = _complete(edges, fields["stages"], whole=tree.get("async_chunk") is False)
    try:
        pipeline = msgspec.convert(fields, PipelineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_with_path_first(str(error))) from None
    StageGraph.from_pipeline(pipeline)
    for stage in pipeline.stages:
        _refuse_unknown_kind(stage.name, stage.kind, stage.model_arch)
    return pipeline


def _stage(stage: Tree, tree: Tree, edges: list[Tree]) -> Tree:
    """`stage` with what the pipeline says for all stages, and its inputs from `edges` if it names none."""
    filled: Tree = {"model_arch": tree.get("model_arch", "")}
    if sources := [edge["source"] for edge in edges if edge["target"] == stage.get("name")]:
        filled["inputs"] = list(dict.fromkeys(sources))
    if (limit := _inline_limit(tree)) is not None:
        filled["inline_limit"] = limit
    filled = merge(filled, stage)
    if "devices" in stage:
        filled["devices"] = _devices(stage["devices"], f"stages[{stage['stage_id']}].devices")
    if isinstance(stage.get("env"), dict):
        filled["env"] = {key: _env_value(value) for key, value in section(stage, "env").items()}
    return filled


def _devices(value: Any, path: str) -> list[str]:
    """A list, or text with commas; bare numbers are CUDA devices, as vLLM-Omni's deploy YAMLs have them."""
    words = cast(list[Any], value) if isinstance(value, list) else str(value).split(",")
    names = [f"cuda:{word}" if word.isdecimal() else word for word in (str(w).strip() for w in words)]
    for name in names:
        if not DEVICE.fullmatch(name):
            raise ConfigError(f"{path}: {name!r} is no device; devices are cpu, cuda and cuda:N.")
    return names


def _env_value(value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if number else value


def _inline_limit(tree: Tree) -> Any:
    """What the shared-memory connector says about the size from which a chunk uses it, in bytes."""
    connectors = section(tree, "connectors")
    extras = [section(section(connectors, label), "extra") for label in connectors]
    return next((extra.get("shm_threshold_bytes") for extra in extras), None)


def _edge(edge: Tree, tree: Tree) -> Tree:
    """`edge` under `EdgeConfig`'s own names; its ends may be given by stage_id."""
    named = {{"from": "source", "to": "target"}.get(key, key): value for key, value in edge.items()}
    by_id = {stage["stage_id"]: stage.get("name") for stage in listed(tree, "stages")}
    ends = {end: by_id.get(named.get(end), named.get(end)) for end in ("source", "target")}
    return {**named, **ends}


def _complete(edges: list[Tree], stages: list[Tree], *, whole: bool) -> list[Tree]:
    """One edge for every input of every stage, with what `edges` say of it; `whole` ones pass no chunks."""
    found: dict[tuple[Any, Any], Tree] = {}
    pairs = [(source, stage.get("name")) for stage in stages for source in stage.get("inputs", ())]
    for edge in [*({"source": source, "target": target} for source, target in pairs), *edges]:
        ends = edge["source"], edge["target"]
        found[ends] = {**found.get(ends, {}), **edge, **({"window_size": -1} if whole else {})}
    return list(found.values())


def _refuse_unknown_kind(stage: str, kind: str, model_arch: str) -> None:
    known = models.kinds(model_arch)
    if kind not in known:
        near = get_close_matches(kind, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
        raise ConfigError(f"Stage {stage}: there is no kind {kind!r}, {hint}")


def _checked(server: ServerConfig) -> ServerConfig:
    # A Struct checks its ranges when it is decoded, not when it is called.
    try:
        return msgspec.convert(msgspec.to_builtins(server), ServerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_with_path_first(str(error))) from None


def _with_path_first(message: str) -> str:
    """msgspec's "Expected … - at `$.stages[1].kind`" as "stages[1].kind: Expected …."."""
    text, _, path = message.partition(" - at `$")
    return f"{path.strip('.`')}: {text}." if path.strip(".`") else f"{text}."


def _refuse_shared_names(pipelines: tuple[PipelineConfig, ...]) -> None:
    seen: dict[str, str] = {}
    for pipeline in pipelines:
        for name in (pipeline.name, *pipeline.aliases):
            if name in seen:
                raise ConfigError(f"{pipeline.name} and {seen[name]} both answer to {name!r}.")
            seen[name] = pipeline.name
