"""A diffusers pipeline as people serve it today: one starlette handler, one lock round the call.

`python -m benchmarks.peers.pipeline_peer FOLDER PORT`. It takes the fields of `/v1/images/generations` and
answers in the same shape.
"""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import warnings
from typing import Any

import torch
import uvicorn
from diffusers import DiffusionPipeline
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

warnings.filterwarnings("ignore")


def make(folder: str) -> Any:
    """The pipeline, in float32."""
    pipe = DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe: Any, body: dict[str, Any]) -> Any:
    """One picture, by the pipeline's own call."""
    width, height = map(int, body["size"].split("x"))
    names = ("prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "true_cfg_scale")
    arguments = {name: body[name] for name in names if name in body}
    generator = torch.Generator().manual_seed(body["seed"])
    return pipe(**arguments, width=width, height=height, generator=generator).images[0]


def route(folder: str) -> Route:
    """One request at a time has the pipeline."""
    pipe, lock = make(folder), asyncio.Lock()

    async def generate(request: Request) -> Response:
        body = await request.json()
        async with lock:
            picture = await run_in_threadpool(draw, pipe, body)
        file = io.BytesIO()
        picture.save(file, "PNG")
        return JSONResponse({"data": [{"b64_json": base64.b64encode(file.getvalue()).decode()}]})

    return Route("/v1/images/generations", generate, methods=["POST"])


if __name__ == "__main__":
    folder, port = sys.argv[1:]
    uvicorn.run(Starlette(routes=[route(folder)]), port=int(port), access_log=False, log_level="warning")
