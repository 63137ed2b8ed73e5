"""`create_app(omni)`: the ASGI application over one engine client."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp

from omni_async.api.chat import ChatEndpoint
from omni_async.api.chat_job import ChatService
from omni_async.api.client import OmniClient
from omni_async.api.completions import CompletionsEndpoint
from omni_async.api.config import ApiConfig
from omni_async.api.echo import EchoEndpoint
from omni_async.api.gateway import Gateway
from omni_async.api.image_job import ImageService
from omni_async.api.images import EditsEndpoint, GenerationsEndpoint
from omni_async.api.life import AppLife
from omni_async.api.media_pool import MediaPool
from omni_async.api.openapi import OpenApiEndpoint
from omni_async.api.ops import AliveEndpoint, MetricsEndpoint, ModelsEndpoint, ReadyEndpoint, VersionEndpoint
from omni_async.api.speech import SpeechEndpoint
from omni_async.api.speech_batch import BatchEndpoint
from omni_async.api.speech_job import SpeechService
from omni_async.api.speech_socket import SpeechSocket
from omni_async.api.tokens import DetokenizeEndpoint, TokenizeEndpoint
from omni_async.api.voices import VoiceEndpoint, VoicesEndpoint


def create_app(omni: OmniClient, config: ApiConfig | None = None) -> Starlette:
    """An application for `uvicorn module:app`, or to be mounted into another one.

    Its lifespan starts `omni` unless that is started already, and closes what it started. An app that
    mounts this one runs no lifespan for it: there the first request starts `omni`, so a host had better
    run `async with omni:` in its own lifespan.
    """
    config = config or ApiConfig()
    life = AppLife(omni, MediaPool(config.media_threads))
    if any(pipeline.speech for pipeline in omni.pipelines):
        life.media.warm()
    app = _App(routes=_routes(omni, config, life.media), lifespan=life.run)
    app.router.redirect_slashes = False
    app.gateway = Gateway(app.router, config, life.ensure_started)
    return app


class _App(Starlette):
    """Starlette with one layer round its router: the gateway answers every error, those of the router
    too, so that Starlette's own two layers for that would never have anything to do."""

    gateway: ASGIApp

    def build_middleware_stack(self) -> ASGIApp:
        """The gateway, and whatever the app's owner has added with `add_middleware` round it."""
        app = self.gateway
        for middleware, args, kwargs in reversed(self.user_middleware):
            app = middleware(app, *args, **kwargs)
        return app


def _routes(omni: OmniClient, config: ApiConfig, media: MediaPool) -> list[BaseRoute]:
    service, images = SpeechService(omni, config, media), ImageService(omni, config, media)
    chat = ChatService(omni, config, media)
    routes: list[BaseRoute] = [
        Route("/v1/audio/speech", SpeechEndpoint(service), methods=["POST"]),
        Route("/v1/audio/speech/batch", BatchEndpoint(service), methods=["POST"]),
        WebSocketRoute("/v1/audio/speech/stream", SpeechSocket(service)),
        Route("/v1/audio/voices", VoicesEndpoint(omni, config), methods=["GET", "POST"]),
        Route("/v1/audio/voices/{name}", VoiceEndpoint(omni), methods=["DELETE"]),
        Route("/v1/images/generations", GenerationsEndpoint(images), methods=["POST"]),
        Route("/v1/images/edits", EditsEndpoint(images), methods=["POST"]),
        Route("/v1/chat/completions", ChatEndpoint(chat), methods=["POST"]),
        Route("/v1/completions", CompletionsEndpoint(chat), methods=["POST"]),
        Route("/tokenize", TokenizeEndpoint(chat), methods=["POST"]),
        Route("/detokenize", DetokenizeEndpoint(chat), methods=["POST"]),
    ]
    if any(pipeline.echo for pipeline in omni.pipelines):
        routes.insert(0, Route("/v1/echo", EchoEndpoint(omni, config), methods=["POST"]))
    return [*routes, *_ops_routes(omni)]


def _ops_routes(omni: OmniClient) -> list[BaseRoute]:
    has_echo = any(pipeline.echo for pipeline in omni.pipelines)
    endpoints = {
        "/health": AliveEndpoint(),
        "/health/ready": ReadyEndpoint(omni),
        "/v1/models": ModelsEndpoint(omni),
        "/metrics": MetricsEndpoint(omni),
        "/version": VersionEndpoint(),
        "/openapi.json": OpenApiEndpoint(has_echo=has_echo),
    }
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in endpoints.items()]
