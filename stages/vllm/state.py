"""A request in a `vllm` stage: what the engine has made for it and the worker has not yet sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omni_async.stages.executor import StageRequest, State, StepOutput

if TYPE_CHECKING:
    from omni_async.stages.vllm.parsing import Parsing


@dataclass(slots=True)
class Made:
    """Since the last chunk."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[Any] = field(default_factory=list[Any])
    hidden: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def anything(self) -> bool:
        """Whether there is a chunk to send: hidden states alone wait for their token."""
        return bool(self.token_ids or self.finish_reason)


class VllmState(State):
    """`engine_id` names the request inside the engine; empty when it is not (or no longer) there."""

    def __init__(self, request: StageRequest, prompt_ids: list[int], media: dict[str, Any]) -> None:
        super().__init__(request, has_upstream=False)
        self.engine_id = ""
        self.prompt_ids = prompt_ids
        self.media = media
        self.wants_hidden = False
        self.hidden_upto = 0
        self.hidden_limit = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.made = Made()
        self.answer: StepOutput | None = None
        self.parsing: Parsing | None = None
        self._first = True

    @property
    def ready(self) -> bool:
        """Something is made, or the engine can make more."""
        return bool(self.engine_id) or self.made.anything or self.answer is not None

    @property
    def cost(self) -> int:
        """The engine has its own budget of tokens a step."""
        return 0

    def take(self) -> list[StepOutput]:
        """What was made since the last call, as one chunk."""
        if self.answer is not None:
            return [self.answer]
        made = self.made
        if not made.anything:
            return []
        self.made = Made()
        self.completion_tokens += len(made.token_ids)
        tensors = {"hidden": np.concatenate(made.hidden)} if made.hidden else {}
        return [StepOutput(tensors=tensors, meta=self._meta(made), final=made.finish_reason is not None)]

    def _meta(self, made: Made) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "text": made.text,
            "finish_reason": made.finish_reason,
            "token_ids": made.token_ids,
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
        }
        if self.parsing is not None:
            meta |= self.parsing.read(made.text, made.token_ids, finish_reason=made.finish_reason)
        if made.logprobs:
            meta["logprobs"] = made.logprobs
        if made.stop_reason is not None:
            meta["stop_reason"] = made.stop_reason
        if self._first and self.request.params.get("speaks"):
            meta |= {"prompt_token_ids": self.prompt_ids, "media": self.media}
        self._first = False
        return meta
