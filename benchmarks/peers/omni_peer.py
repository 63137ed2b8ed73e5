"""Qwen3-Omni as transformers alone serves it: one starlette handler, one lock round `generate`.

`python -m benchmarks.peers.omni_peer FOLDER PORT`. It answers `{"question": …, "tokens": …,
"frames": …}` with PCM, greedily, as the benchmark asks ours to.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from omni_async.stages.torchvision_operators import make_torchvision_importable

make_torchvision_importable()

import torch  # noqa: E402
import uvicorn  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.concurrency import run_in_threadpool  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import Response  # noqa: E402
from starlette.routing import Route  # noqa: E402
from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration  # noqa: E402


def speak(model: Any, tokenizer: Any, body: dict[str, Any]) -> bytes:
    """The whole answer's sound, float32."""
    messages = [{"role": "user", "content": body["question"]}]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.inference_mode():
        _, wave = model.generate(
            ids,
            thinker_max_new_tokens=body["tokens"],
            thinker_eos_token_id=None,
            thinker_do_sample=False,
            talker_do_sample=False,
            talker_max_new_tokens=body["frames"] + 1,
        )
    return wave.numpy().tobytes()


def route(folder: str) -> Route:
    """One request at a time has the model."""
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.thinker.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lock = asyncio.Lock()

    async def generate(request: Request) -> Response:
        body = await request.json()
        async with lock:
            return Response(await run_in_threadpool(speak, model, tokenizer, body))

    return Route("/speak", generate, methods=["POST"])


if __name__ == "__main__":
    folder, port = sys.argv[1:]
    uvicorn.run(Starlette(routes=[route(folder)]), port=int(port), access_log=False, log_level="warning")
