"""Tool calls and reasoning, read out of the text as it is made by vLLM's own parsers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager

from omni_async.errors import ConfigError, InvalidRequest
from omni_async.stages.vllm.errors import CLIENT_ERRORS

Meta = dict[str, Any]


class Parsers:
    """Makes a parser for each conversation. Raises `ConfigError` for a name that vLLM does not know."""

    def __init__(self, tool_parser: str, reasoning_parser: str, tokenizer: Any, model_config: Any) -> None:
        try:
            self._make = ParserManager.get_parser(
                tool_parser_name=tool_parser or None,
                reasoning_parser_name=reasoning_parser or None,
                enable_auto_tools=True,
                tokenizer=tokenizer,
            )
        except TypeError as error:
            raise ConfigError(str(error)) from error
        self._tokenizer = tokenizer
        self._model_config = model_config

    def parse(self, params: Mapping[str, Any], prompt_ids: list[int]) -> Parsing | None:
        """For a request; None where there is nothing to parse. Raises `InvalidRequest`."""
        if self._make is None or "messages" not in params:
            return None
        tools = params.get("tools") or None
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": ""}], "model": "model"}
        if tools:
            asked |= {"tools": tools, "tool_choice": params.get("tool_choice") or "auto"}
            if params.get("parallel_tool_calls") is not None:
                asked["parallel_tool_calls"] = params["parallel_tool_calls"]
        try:
            request = ChatCompletionRequest(**asked)
            parser = self._make(
                self._tokenizer, list(request.tools or ()) or None, model_config=self._model_config
            )
            return Parsing(parser, parser.adjust_request(request), prompt_ids)
        except CLIENT_ERRORS as error:
            raise InvalidRequest(f"tools cannot be read: {error}", param="tools") from error


class Parsing:
    """One answer being parsed."""

    def __init__(self, parser: Any, request: Any, prompt_ids: list[int]) -> None:
        self._parser = parser
        self._request = request
        self._prompt_ids = prompt_ids
        self._called = False

    @property
    def structure(self) -> Any:
        """What the parser wants the text to keep to, as vLLM's `StructuredOutputsParams`; None: nothing."""
        return getattr(self._request, "structured_outputs", None)

    @property
    def keeps_special_tokens(self) -> bool:
        """Whether the marks of tool calls are special tokens, which the text must then have."""
        return not self._request.skip_special_tokens

    def read(self, text: str, token_ids: list[int], *, finish_reason: str | None) -> Meta:
        """`text`, `reasoning`, `tool_calls` and `finish_reason` of what is new."""
        delta = self._parser.parse_delta(
            text, token_ids, self._request, self._prompt_ids, finished=finish_reason is not None
        )
        found: Meta = {"text": (delta and delta.content) or "", "finish_reason": finish_reason}
        if delta and delta.reasoning:
            found["reasoning"] = delta.reasoning
        if delta and delta.tool_calls:
            self._called = True
            found["tool_calls"] = [_call(call) for call in delta.tool_calls]
        if finish_reason == "stop" and self._called:
            found["finish_reason"] = "tool_calls"
        return found


def _call(call: Any) -> Meta:
    function = call.function
    return {
        "index": call.index,
        "id": call.id,
        "name": function.name if function else None,
        "arguments": function.arguments if function else None,
    }
