"""Executors that do what their request says, and an engine that runs them in threads."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np

from omni_async.config import Deployment, EdgeConfig, PipelineConfig, ServerConfig, StageConfig
from omni_async.engine import Engine
from omni_async.errors import InvalidRequest
from omni_async.launcher import ThreadLauncher
from omni_async.stages.executor import Executor, StageRequest, State, StepOutput
from omni_async.stream import Delivery, ResultStream


class SourceState(State):
    """How far it has counted."""

    def __init__(self, request: StageRequest) -> None:
        super().__init__(request, has_upstream=False)
        self.at = 0


class Source:
    """Emits `params["count"]` arrays of `params["size"]` numbers, one a step, each filled with
    `start + index`. `fail_at`, `poison_at` and `gate` say where to raise, send rubbish or wait."""

    gates: ClassVar[dict[str, threading.Event]] = {}

    def __init__(self) -> None:
        self.states: set[int] = set()
        self.batches: list[int] = []

    def load(self) -> None:
        """Nothing to load."""

    def admit(self, request: StageRequest) -> SourceState:
        if request.params.get("invalid"):
            raise InvalidRequest("refused by the stage", param="invalid")
        self.states.add(request.request)
        return SourceState(request)

    def step(self, states: Sequence[SourceState]) -> list[list[StepOutput]]:
        self.batches.append(len(states))
        for state in states:
            if state.request.params.get("fail_at") == state.at:
                raise RuntimeError("scripted failure")
            if gate := state.request.params.get("gate"):
                assert self.gates[gate].wait(10)
        return [[self._next(state)] for state in states]

    def _next(self, state: SourceState) -> StepOutput:
        params = state.request.params
        if params.get("poison_at") == state.at:
            return StepOutput(meta={"rubbish": object()})
        value = params.get("start", 0) + state.at
        state.at += 1
        final = state.at == params["count"]
        if final:
            self.states.discard(state.request.request)
        array = np.full(params.get("size", 4), value, np.float32)
        return StepOutput(tensors={"x": array}, meta={"index": state.at - 1}, duration=0.1, final=final)

    def abort(self, state: SourceState) -> None:
        self.states.discard(state.request.request)

    def close(self) -> None:
        """Nothing to release."""


class DoubleState(State):
    """Fed by a source."""

    def __init__(self, request: StageRequest) -> None:
        super().__init__(request, has_upstream=True)


class Double:
    """Doubles each array it is given."""

    def __init__(self) -> None:
        self.states: set[int] = set()

    def load(self) -> None:
        """Nothing to load."""

    def admit(self, request: StageRequest) -> DoubleState:
        self.states.add(request.request)
        return DoubleState(request)

    def step(self, states: Sequence[DoubleState]) -> list[list[StepOutput]]:
        results: list[list[StepOutput]] = []
        for state in states:
            chunk = state.inputs.popleft()
            if chunk.final:
                self.states.discard(state.request.request)
            output = StepOutput(
                tensors={"x": chunk.tensors["x"] * 2}, meta=chunk.meta, duration=0.1, final=chunk.final
            )
            results.append([output])
        return results

    def abort(self, state: DoubleState) -> None:
        self.states.discard(state.request.request)

    def close(self) -> None:
        """Nothing to release."""


PIPELINE = PipelineConfig(
    name="p",
    stages=(
        StageConfig(stage_id=0, name="source", kind="source"),
        StageConfig(stage_id=1, name="double", kind="double", inputs=("source",), final_output=True),
    ),
    edges=(EdgeConfig(source="source", target="double", window_size=4),),
    client_window=4,
)


class Scripted:
    """A running engine and the executors inside it."""

    def __init__(self, pipeline: PipelineConfig, server: ServerConfig) -> None:
        self.executors: dict[str, Any] = {}
        self.engine = Engine(
            Deployment(pipelines=(pipeline,), server=server),
            lambda run_dir, _: ThreadLauncher(run_dir, self._create),
        )

    def _create(self, config: StageConfig) -> Executor:
        made: Any = Source() if config.kind == "source" else Double()
        self.executors[config.name] = made
        return made

    def submit(self, **params: Any) -> ResultStream:
        """Begin a request."""
        return self.engine.submit("p", params, request_id="r")

    def held(self) -> int:
        """States that executors hold."""
        return sum(len(executor.states) for executor in self.executors.values())


@asynccontextmanager
async def scripted(pipeline: PipelineConfig = PIPELINE, **server: Any) -> AsyncIterator[Scripted]:
    """A started engine; checked and closed at the end."""
    made = Scripted(pipeline, ServerConfig(**server))
    await made.engine.start()
    try:
        yield made
        made.engine.scheduler.check()
    finally:
        await made.engine.close()


async def collect(stream: ResultStream) -> list[Delivery]:
    """All of it."""
    return [delivery async for delivery in stream]


def values(deliveries: list[Delivery]) -> list[float]:
    """The number that fills each array, which must be the same throughout."""
    for delivery in deliveries:
        assert np.ptp(delivery.arrays["x"]) == 0
    return [float(delivery.arrays["x"][0]) for delivery in deliveries]
