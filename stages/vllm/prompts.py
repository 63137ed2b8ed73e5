"""From a request's messages, text or tokens to what vLLM's engine takes, by vLLM's own renderer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.renderers import BaseRenderer, ChatParams, TokenizeParams

from omni_async.errors import InvalidRequest
from omni_async.stages.executor import StageRequest
from omni_async.stages.vllm.errors import CLIENT_ERRORS
from omni_async.stages.vllm.media import media_of
from omni_async.stages.vllm.settings import Settings

Prompt = dict[str, Any]


def render(renderer: BaseRenderer[Any], request: StageRequest, settings: Settings) -> Prompt:
    """The engine's input: token ids, and the processed media. Raises `InvalidRequest`."""
    params = request.params
    try:
        if "messages" in params:
            return _chat(renderer, request, settings)
        if "prompt_embeds" in request.tensors:
            return _only(renderer.render_cmpl([{"prompt_embeds": _tensor(request.tensors["prompt_embeds"])}]))
        if "prompt_token_ids" in params:
            return _only(renderer.render_cmpl([{"prompt_token_ids": list(params["prompt_token_ids"])}]))
        tokenize = TokenizeParams(
            max_total_tokens=renderer.default_cmpl_tok_params.max_total_tokens,
            add_special_tokens=params.get("add_special_tokens", True),
        )
        return _only(renderer.render_cmpl([{"prompt": params["prompt"]}], tokenize))
    except InvalidRequest:
        raise
    except (*CLIENT_ERRORS, LookupError, RuntimeError) as error:
        field = "messages" if "messages" in params else "prompt"
        raise InvalidRequest(f"{field} cannot be read: {error}", param=field) from error
    except Exception as error:
        if type(error).__module__.startswith("jinja2"):
            raise InvalidRequest(
                f"The chat template refuses these messages: {error}", param="messages"
            ) from error
        raise


def _chat(renderer: BaseRenderer[Any], request: StageRequest, settings: Settings) -> Prompt:
    params = request.params
    template = {"add_generation_prompt": params.get("add_generation_prompt", True), "tokenize": False}
    if params.get("continue_final_message"):
        template["continue_final_message"] = True
    processing = _processing(params, settings)
    chat = ChatParams(
        chat_template=settings.chat_template,
        chat_template_kwargs={
            **params.get("chat_template_kwargs", {}),
            **template,
            "tools": params.get("tools") or None,
        },
        mm_processor_kwargs=processing,
    )
    with media_of(request.tensors, dict(params)):
        _, prompts = renderer.render_chat(
            [_messages(params["messages"])], chat, prompt_extras={"mm_processor_kwargs": processing}
        )
    return _only(prompts)


def _processing(params: Mapping[str, Any], settings: Settings) -> dict[str, Any] | None:
    """What the model's processor is told. It takes one frame rate for all films: the lowest, so that none
    is shortened."""
    given = params.get("mm_processor_kwargs")
    if settings.times_films and (rates := params.get("video_fps")):
        return {"fps": min(rates.values()), **(given or {})}
    return given


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A copy that vLLM may change: it parses the arguments of tool calls in place."""
    return [
        {**message, "tool_calls": [{**c, "function": dict(c["function"])} for c in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _only(prompts: Sequence[Any]) -> Prompt:
    (prompt,) = prompts
    return prompt


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array.copy())


def token_ids(prompt: Prompt) -> list[int]:
    """The prompt's tokens; none where it came as embeddings."""
    return list(prompt.get("prompt_token_ids") or ())
