"""The `echo` kind: text comes back, one chunk a step. For tests and for measuring the engine."""

from __future__ import annotations

from collections.abc import Sequence

from omni_async.config import StageConfig
from omni_async.errors import ConfigError, InvalidRequest
from omni_async.stages.executor import Executor, StageRequest, State, StepOutput


class EchoState(State):
    """How many chunks are still to come."""

    def __init__(self, request: StageRequest, left: int) -> None:
        super().__init__(request, has_upstream=False)
        self.left = left


class EchoExecutor:
    """No model: `params["text"]`, `params["chunks"]` times."""

    def load(self) -> None:
        """Nothing to load."""

    def admit(self, request: StageRequest) -> EchoState:
        """Raises `InvalidRequest` when there is no text."""
        if not isinstance(request.params.get("text"), str):
            raise InvalidRequest("text must be a string.", param="text")
        return EchoState(request, int(request.params.get("chunks", 1)))

    def step(self, states: Sequence[EchoState]) -> list[list[StepOutput]]:
        """One chunk each."""
        return [[self._chunk(state)] for state in states]

    def _chunk(self, state: EchoState) -> StepOutput:
        state.left -= 1
        return StepOutput(meta={"text": state.request.params["text"]}, final=state.left == 0)

    def abort(self, state: EchoState) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing to release."""


def create(config: StageConfig) -> Executor:
    """The executor of an `echo` stage."""
    if config.engine_extras:
        raise ConfigError(f"The echo kind takes no engine_extras: {sorted(config.engine_extras)}.")
    return EchoExecutor()
