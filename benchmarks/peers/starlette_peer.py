"""A bare starlette handler under uvicorn: what our engine is measured against.

`python -m benchmarks.peers.starlette_peer echo|speech PORT`. Speech runs in starlette's thread pool.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


async def echo(request: Request) -> Response:
    """The text, at once or in chunks."""
    body = await request.json()
    if not body.get("stream"):
        return JSONResponse({"text": body["text"]})

    async def chunks() -> AsyncIterator[str]:
        for _ in range(body["chunks"]):
            yield body["text"]

    return StreamingResponse(chunks(), media_type="text/plain")


def speech_routes() -> list[Route]:
    """Whole answers and sentences, by one model that all threads share."""
    from benchmarks.peers.package import make, pcm16, sentences

    voice = make()

    async def whole(request: Request) -> Response:
        text = (await request.json())["text"]
        return Response(await run_in_threadpool(lambda: pcm16(voice(text))), media_type="audio/pcm")

    async def stream(request: Request) -> Response:
        text = (await request.json())["text"]
        return StreamingResponse(iterate_in_threadpool(sentences(voice, text)), media_type="audio/pcm")

    return [Route("/speech", whole, methods=["POST"]), Route("/stream", stream, methods=["POST"])]


if __name__ == "__main__":
    kind, port = sys.argv[1:]
    routes = [Route("/echo", echo, methods=["POST"])] if kind == "echo" else speech_routes()
    uvicorn.run(Starlette(routes=routes), port=int(port), access_log=False, log_level="warning")
