"""From a request's parameters to vLLM's `SamplingParams`."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from omni_async.errors import InvalidRequest
from omni_async.stages.executor import StageRequest
from omni_async.stages.vllm.errors import CLIENT_ERRORS
from omni_async.stages.vllm.parsing import Parsing

FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


def sampling_params(
    request: StageRequest,
    *,
    room: int,
    defaults: dict[str, Any],
    reads_all: bool,
    parsing: Parsing | None = None,
) -> SamplingParams:
    """The parameters of a request whose prompt leaves `room` tokens. `defaults` are the model's own
    generation config; `reads_all` forbids to skip a cached prefix; `parsing` may
    want the text in a form of its own. Raises `InvalidRequest`.
    """
    request.refuse_unknown((*FIELDS, "max_tokens", "structured_outputs"))
    params = {**defaults, **request.params}
    if room < 1:
        raise InvalidRequest(
            "The prompt leaves no room for an answer.", param="messages", code="context_length_exceeded"
        )
    asked = params.get("max_tokens")
    if "max_tokens" in request.own and asked is not None and asked > room:
        message = f"max_tokens is {asked}, and the prompt leaves room for {room}."
        raise InvalidRequest(message, param="max_tokens", code="context_length_exceeded")
    chosen = {name: params[name] for name in FIELDS if params.get(name) is not None}
    if "logit_bias" in chosen:
        chosen["logit_bias"] = {int(token): bias for token, bias in chosen["logit_bias"].items()}
    if parsing is not None and parsing.keeps_special_tokens:
        chosen["skip_special_tokens"] = False
    try:
        return SamplingParams(
            **chosen,
            max_tokens=min(room, asked or room),
            seed=request.seed % 2**63 if chosen.get("temperature", 1.0) > 0 else None,
            structured_outputs=_structure(params.get("structured_outputs"), parsing),
            skip_reading_prefix_cache=True if reads_all else None,
            output_kind=RequestOutputKind.DELTA,
        )
    except CLIENT_ERRORS as error:
        raise InvalidRequest(str(error), param=getattr(error, "parameter", None)) from None


def _structure(asked: dict[str, Any] | None, parsing: Parsing | None) -> StructuredOutputsParams | None:
    calls = parsing.structure if parsing is not None else None
    if calls is not None and asked:
        message = "The tool calls of this request have a form of their own; it cannot have another."
        raise InvalidRequest(message, param="response_format")
    return StructuredOutputsParams(**asked) if asked else calls
