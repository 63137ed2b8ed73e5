"""Builders of data for tests of pure objects."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

from omni_async.config import EdgeConfig, PipelineConfig, ServerConfig, StageConfig
from omni_async.errors import OmniError
from omni_async.events import Action, Cancel, Deliver, End, FromWorker, Send, Submit, Taken, WorkerUp
from omni_async.messages import Consumed, EngineMessage, Failed, Output, TensorRef
from omni_async.plan import PipelinePlan
from omni_async.scheduler import Scheduler


def make_stage(name: str, stage_id: int = 0, **fields: Any) -> StageConfig:
    """A stage of kind `echo`."""
    return StageConfig(stage_id=stage_id, name=name, kind="echo", **fields)


def make_pipeline(
    *,
    talker: dict[str, Any] | None = None,
    vocoder: dict[str, Any] | None = None,
    window: int = 8,
    **fields: Any,
) -> PipelineConfig:
    """`talker` → `vocoder`, the shape of a speech pipeline."""
    return PipelineConfig(
        name="p",
        stages=(
            make_stage("talker", 0, **(talker or {})),
            make_stage("vocoder", 1, inputs=("talker",), final_output=True, **(vocoder or {})),
        ),
        edges=(EdgeConfig(source="talker", target="vocoder", window_size=window),),
        **fields,
    )


class Harness:
    """A scheduler with a manual clock, driven event by event; `check()` runs after each."""

    def __init__(self, pipeline: PipelineConfig, *, up: bool = True, **server: Any) -> None:
        self.scheduler = Scheduler({pipeline.name: PipelinePlan(pipeline)}, ServerConfig(**server))
        self.pipeline = pipeline
        self.now = 100.0
        self.log: list[Action] = []
        self.keys = 0
        if up:
            for pool in list(self.scheduler.pools.values()):
                for replica in pool.replicas:
                    self.handle(WorkerUp(replica))

    def handle(self, event: Any) -> list[Action]:
        actions = self.scheduler.handle(event, self.now)
        self.scheduler.check()
        self.log += actions
        return actions

    def submit(
        self,
        *,
        gapless: bool = True,
        timeout: float = 60.0,
        frames: tuple[bytes, ...] = (),
        outputs: tuple[str, ...] = (),
        **params: Any,
    ) -> int:
        self.keys += 1
        self.handle(
            Submit(
                key=self.keys,
                request_id=f"r{self.keys}",
                pipeline=self.pipeline.name,
                params=params,
                seed=self.keys,
                gapless=gapless,
                deadline=self.now + timeout,
                tensors={f"image{i}": TensorRef("uint8", (len(f),), i) for i, f in enumerate(frames)},
                frames=frames,
                outputs=outputs,
            )
        )
        return self.keys

    def wire(self, key: int) -> int:
        return self.scheduler.requests[key].wire

    def output(
        self, key: int, stage: str, seq: int, *, replica: int = 0, shm: bool = False, **fields: Any
    ) -> list[Action]:
        tensors = {"x": TensorRef("float32", (4,), segment="s" if shm else "")}
        message = Output(request=self.wire(key), seq=seq, tensors=tensors, **fields)
        return self.handle(FromWorker(f"p.{stage}.{replica}", message, ()))

    def consumed(self, key: int, stage: str, source: str, upto: int, replica: int = 0) -> list[Action]:
        message = Consumed(request=self.wire(key), source=source, upto=upto)
        return self.handle(FromWorker(f"p.{stage}.{replica}", message))

    def failed(self, key: int, stage: str, error: OmniError) -> list[Action]:
        return self.handle(FromWorker(f"p.{stage}.0", Failed(request=self.wire(key), error=error.info())))

    def taken(self, key: int, upto: int, stage: str = "vocoder") -> list[Action]:
        return self.handle(Taken(key, stage, upto))

    def cancel(self, key: int) -> list[Action]:
        return self.handle(Cancel(key))


M = TypeVar("M", bound=EngineMessage)


class Sent(NamedTuple, Generic[M]):
    """A message and whom it was sent to."""

    replica: str
    message: M


def sent(actions: list[Action], kind: type[M]) -> list[Sent[M]]:
    """The messages of `kind` that were sent."""
    sends = [action for action in actions if isinstance(action, Send)]
    return [Sent(send.replica, send.message) for send in sends if isinstance(send.message, kind)]


def ends(actions: list[Action]) -> list[End]:
    """The ends."""
    return [a for a in actions if isinstance(a, End)]


def deliveries(actions: list[Action]) -> list[Deliver]:
    """The deliveries."""
    return [a for a in actions if isinstance(a, Deliver)]
