"""What the engine tells about itself: the state of stages, and one record per ended request."""

from __future__ import annotations

from typing import Literal

import msgspec

ReplicaState = Literal["starting", "ready", "hung", "down", "failed"]
FinishReason = Literal["stop", "abort", "failed", "refused", "deadline"]


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. `last_step_age` is seconds since its last finished step while it has work, else 0."""

    name: str
    state: ReplicaState
    pid: int | None = None
    running: int = 0
    steps: int = 0
    batch_size: float = 0.0
    last_step_age: float = 0.0
    restarts: int = 0


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: `waiting` requests hold no slot yet, `running` ones do."""

    pipeline: str
    stage: str
    kind: str
    state: Literal["ready", "degraded", "down"]
    replicas_up: int
    replicas: tuple[ReplicaStatus, ...]
    waiting: int
    running: int
    transfer_bytes: int = 0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`ready` is true when every stage has a replica that takes work."""

    ready: bool
    draining: bool
    stages: tuple[StageStatus, ...]
    late_messages: int = 0


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How one request went; seconds throughout. `first_chunk_seconds` is None when nothing was delivered."""

    request_id: str
    pipeline: str
    reason: FinishReason
    queue_seconds: float
    first_chunk_seconds: float | None
    total_seconds: float
    media_seconds: float
    underrun_seconds: float
    gapless: bool
    retries: int = 0
