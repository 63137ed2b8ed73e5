"""From the sampling fields of a request to a language-model stage's parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from omni_async.api.chat_fields import ChatBody, CompletionBody, SamplingFields
from omni_async.errors import InvalidRequest

_SAME = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
    *("allowed_token_ids", "bad_words", "skip_special_tokens", "include_stop_str_in_output"),
)


def sampling_of(body: SamplingFields) -> dict[str, Any]:
    """The parameters. Raises `InvalidRequest` for fields that contradict each other."""
    params = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if "logit_bias" in params:
        _refuse_words(params["logit_bias"])
    if (structure := _structure(body)) is not None:
        params["structured_outputs"] = structure
    if isinstance(body, ChatBody):
        _chat(body, params)
    elif isinstance(body, CompletionBody) and body.logprobs is not None:
        params["logprobs"] = body.logprobs
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options are for streams.", param="stream_options")
    return params


def _chat(body: ChatBody, params: dict[str, Any]) -> None:
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            message = "max_tokens and max_completion_tokens say different things."
            raise InvalidRequest(message, param="max_tokens")
        params["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        params["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs is not None:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")


def _refuse_words(bias: dict[str, float]) -> None:
    for token in bias:
        if not token.isdecimal():
            raise InvalidRequest(f"logit_bias names tokens by number, not {token!r}.", param="logit_bias")


def _structure(body: SamplingFields) -> dict[str, Any] | None:
    form, own = body.response_format, body.structured_outputs
    if own is not None:
        given = {name: value for name, value in msgspec.structs.asdict(own).items() if value is not None}
        if len(given) != 1:
            message = "structured_outputs needs exactly one constraint."
            raise InvalidRequest(message, param="structured_outputs")
        if form is not None and form.type != "text":
            message = "response_format and structured_outputs exclude each other."
            raise InvalidRequest(message, param="response_format")
        return given
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"json_object": True}
    if form.json_schema is None:
        raise InvalidRequest("json_schema is missing.", param="response_format.json_schema")
    return {"json": form.json_schema.schema}
