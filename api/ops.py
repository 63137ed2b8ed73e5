"""`/v1/models`, `/health`, `/health/ready`, `/metrics`, `/version`."""

from __future__ import annotations

import time
from importlib import metadata

import msgspec
from starlette.types import Receive, Scope, Send

from omni_async.api.client import OmniClient
from omni_async.api.exchange import send_body, send_json


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A name that `model` takes; `root` is the pipeline that it stands for."""

    id: str
    root: str
    created: int
    object: str = "model"
    owned_by: str = "omni_async"


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's list."""

    data: list[ModelCard]
    object: str = "list"


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """The process runs."""

    status: str = "ok"


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The installed version."""

    version: str


class ModelsEndpoint:
    """`GET /v1/models`: pipelines and their aliases."""

    def __init__(self, omni: OmniClient) -> None:
        created = int(time.time())
        self._list = ModelList(
            data=[
                ModelCard(id=name, root=pipeline.name, created=created)
                for pipeline in omni.pipelines
                for name in (pipeline.name, *pipeline.aliases)
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await send_json(send, self._list)


class AliveEndpoint:
    """`GET /health`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await send_json(send, Alive())


class ReadyEndpoint:
    """`GET /health/ready`: each stage's state; 503 unless all take work."""

    def __init__(self, omni: OmniClient) -> None:
        self._omni = omni

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        health = self._omni.health()
        await send_json(send, health, 200 if health.ready and not health.draining else 503)


class MetricsEndpoint:
    """`GET /metrics`."""

    def __init__(self, omni: OmniClient) -> None:
        from omni_async.api.metrics import Metrics  # prometheus_client is slow to load

        self._metrics = Metrics(omni)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one scrape."""
        await send_body(send, self._metrics.text(), b"text/plain; version=0.0.4; charset=utf-8")


class VersionEndpoint:
    """`GET /version`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await send_json(send, Version(version=installed_version()))


def installed_version() -> str:
    """The version of the installed package, or of the source tree where nothing is installed."""
    try:
        return metadata.version("omni-async")
    except metadata.PackageNotFoundError:
        from omni_async import __version__

        return __version__
