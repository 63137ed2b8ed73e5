"""What the stages of a pipeline form together: a directed graph without cycles, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from omni_async.config import EdgeConfig, PipelineConfig, StageConfig
from omni_async.errors import ConfigError


class StageGraph:
    """Stages by name, and who feeds whom. Made by `from_pipeline`, which refuses what cannot run."""

    def __init__(
        self, stages: Mapping[str, StageConfig], edges: Mapping[tuple[str, str], EdgeConfig]
    ) -> None:
        self.stages = dict(stages)
        self._edges = dict(edges)
        self.upstream = {name: stage.inputs for name, stage in self.stages.items()}
        self.downstream = {
            name: tuple(s.name for s in self.stages.values() if name in s.inputs) for name in self.stages
        }
        self.entry = tuple(name for name, inputs in self.upstream.items() if not inputs)
        self.final = tuple(name for name, stage in self.stages.items() if stage.final_output)

    @classmethod
    def from_pipeline(cls, pipeline: PipelineConfig) -> StageGraph:
        """The graph of `pipeline`. Raises `ConfigError` naming the stages at fault."""
        where = f"Pipeline {pipeline.name}"
        _refuse_doubles(where, "stage", [stage.name for stage in pipeline.stages])
        _refuse_doubles(where, "stage_id", [stage.stage_id for stage in pipeline.stages])
        _refuse_doubles(where, "edge", [f"{edge.source} → {edge.target}" for edge in pipeline.edges])
        stages = {stage.name: stage for stage in pipeline.stages}
        for stage in pipeline.stages:
            _refuse_doubles(where, f"input of stage {stage.name}", stage.inputs)
            _refuse_dangling(where, stage, stages)
        for edge in pipeline.edges:
            _refuse_useless(where, edge, stages)
        graph = cls(stages, {(edge.source, edge.target): edge for edge in pipeline.edges})
        graph._refuse_what_cannot_run(where)
        return graph

    def edge(self, source: str, target: str) -> EdgeConfig:
        """The edge's settings, or the defaults where the pipeline names none."""
        return self._edges.get((source, target)) or EdgeConfig(source=source, target=target)

    def _refuse_what_cannot_run(self, where: str) -> None:
        try:
            TopologicalSorter(self.upstream).prepare()
        except CycleError as error:
            raise ConfigError(f"{where}: its stages form a cycle: {' → '.join(error.args[1])}.") from None
        if not self.final:
            raise ConfigError(f"{where}: no stage has final_output, so nothing would be answered.")
        if idle := [name for name in self.stages if not self._is_heard(name)]:
            raise ConfigError(f"{where}: nothing uses the output of stage {idle[0]}.")

    def _is_heard(self, name: str) -> bool:
        return name in self.final or any(map(self._is_heard, self.downstream[name]))


def _refuse_doubles(where: str, what: str, names: Sequence[object]) -> None:
    if doubles := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{where}: {what} {doubles[0]} stands twice.")


def _refuse_dangling(where: str, stage: StageConfig, stages: Mapping[str, StageConfig]) -> None:
    for name in stage.inputs:
        if name not in stages:
            known = ", ".join(stages)
            raise ConfigError(f"{where}: stage {stage.name} takes input from {name}; the stages are {known}.")


def _refuse_useless(where: str, edge: EdgeConfig, stages: Mapping[str, StageConfig]) -> None:
    target = stages.get(edge.target)
    if target is None or edge.source not in target.inputs:
        raise ConfigError(
            f"{where}: edge {edge.source} → {edge.target} joins nothing: no stage {edge.target} "
            f"has {edge.source} among its inputs."
        )
    if edge.window_size == 0:
        raise ConfigError(
            f"{where}: edge {edge.source} → {edge.target} lets nothing pass with window_size 0; "
            "give at least 1, or -1 for whole outputs."
        )
