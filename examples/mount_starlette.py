"""Mount the speech API into a Starlette app of your own.

    uvicorn examples.mount_starlette:app --port 8092
    curl http://127.0.0.1:8092/omni/v1/audio/speech -d '{"input": "Hello."}' \\
      -H 'Content-Type: application/json' -o hello.wav
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from omni_async import AsyncOmni
from omni_async.api.app import create_app

omni = AsyncOmni(model="hibari")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Starlette does not run the lifespan of a mounted app, so the stages start and stop here."""
    async with omni:
        yield


async def home(request: Request) -> PlainTextResponse:
    """A page of your own."""
    return PlainTextResponse("Speech lives under /omni.")


app = Starlette(routes=[Route("/", home), Mount("/omni", create_app(omni))], lifespan=lifespan)
