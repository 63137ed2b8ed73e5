"""What the scheduler needs to know of one pipeline, worked out once."""

from __future__ import annotations

from msgspec.structs import replace

from omni_async.config import PipelineConfig
from omni_async.graph import StageGraph

CLIENT = "client"
UNBOUNDED = 1 << 30


class PipelinePlan:
    """A pipeline's stage graph as look-ups by stage name.

    `consumers[s]` are those who must be done with an output of `s` before its memory is reused;
    `window[s]` is how many of its outputs may be unacknowledged; `whole_sources[s]` are the sources
    that must have finished before `s` starts (edges with a window of -1).
    """

    def __init__(self, pipeline: PipelineConfig) -> None:
        graph = StageGraph.from_pipeline(pipeline)
        self._pipeline = pipeline
        self._graph = graph
        self._parts: dict[tuple[str, ...], PipelinePlan] = {}
        self.name = pipeline.name
        self.stages = {stage.name: stage for stage in pipeline.stages}
        self.entry = graph.entry
        self.final = graph.final
        self.upstream = {name: graph.upstream[name] for name in self.stages}
        self.downstream = {name: graph.downstream[name] for name in self.stages}
        self.consumers = {
            name: (*graph.downstream[name], *([CLIENT] if name in graph.final else []))
            for name in self.stages
        }
        self.window = {name: self._window(graph, pipeline, name) for name in self.stages}
        self.whole_sources = {
            name: tuple(s for s in graph.upstream[name] if graph.edge(s, name).window_size == -1)
            for name in self.stages
        }
        self.max_inflight = {name: self._max_inflight(graph, name) for name in self.stages}

    def only(self, outputs: tuple[str, ...]) -> PipelinePlan:
        """The plan of a request that wants these final stages alone; none named: all."""
        if not outputs or set(outputs) == set(self.final):
            return self
        if outputs not in self._parts:
            self._parts[outputs] = PipelinePlan(self._part(set(outputs)))
        return self._parts[outputs]

    def _part(self, outputs: set[str]) -> PipelineConfig:
        needed, todo = set[str](), list(outputs)
        while todo:
            name = todo.pop()
            needed.add(name)
            todo.extend(self._graph.upstream[name])
        stages = tuple(
            replace(stage, final_output=stage.name in outputs)
            for stage in self._pipeline.stages
            if stage.name in needed
        )
        edges = tuple(edge for edge in self._pipeline.edges if edge.target in needed)
        return replace(self._pipeline, stages=stages, edges=edges)

    def _window(self, graph: StageGraph, pipeline: PipelineConfig, name: str) -> int:
        windows = [graph.edge(name, target).window_size for target in graph.downstream[name]]
        if name in graph.final:
            windows.append(pipeline.client_window)
        return UNBOUNDED if -1 in windows else min(windows)

    def _max_inflight(self, graph: StageGraph, name: str) -> int:
        limits = [graph.edge(source, name).max_inflight for source in graph.upstream[name]]
        return min((limit for limit in limits if limit), default=0)
