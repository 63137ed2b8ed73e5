"""Choosing tokens: what may be asked for, and the draw itself, by transformers' own logits processors.

The draw of step n depends on the request's seed and n alone, so that neither company nor a step that is run
again can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

import msgspec
import torch
from msgspec import Meta
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omni_async.config import StageConfig
from omni_async.errors import ConfigError, InvalidRequest
from omni_async.stages.executor import StageRequest


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Temperature 0 takes the likeliest token. `top_k` 0 and `top_p` 1 leave all tokens in."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    max_tokens: Annotated[int, Meta(ge=1)] = 4096


def read_sampling(request: StageRequest) -> Sampling:
    """What the request asks of this stage. Raises `InvalidRequest` naming the parameter."""
    known = Sampling.__struct_fields__
    request.refuse_unknown(known)
    given = {name: request.params[name] for name in known if request.params.get(name) is not None}
    try:
        return msgspec.convert(given, Sampling, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"sampling_params_list: {error}.", param="sampling_params_list") from None


def check_defaults(config: StageConfig) -> None:
    """Raises `ConfigError` for a default that no request could ask for."""
    defaults = config.default_sampling_params
    try:
        msgspec.convert(defaults, Sampling)
        read_sampling(StageRequest(request=-1, params=defaults, seed=0, own=frozenset(defaults)))
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ConfigError(f"Stage {config.name}: default_sampling_params: {error}") from None


class Sampler:
    """The draws of one request. `before` are the tokens that count as said already."""

    def __init__(self, sampling: Sampling, seed: int, before: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self._seed = seed
        self._before = list(before)
        self._penalty = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            self._penalty.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        self.warpers = _warpers(sampling)

    def choose(self, logits: Tensor, tokens: Sequence[int]) -> int:
        """The token after `tokens`, given its logits `[vocabulary]`."""
        said = torch.tensor([[*self._before, *tokens]], dtype=torch.long, device=logits.device)
        scores: Any = self._penalty(cast(Any, said), cast(Any, logits[None].float()))
        if self.sampling.temperature == 0:
            return int(scores.argmax())
        scores = self.warpers(cast(Any, said), scores)
        return int(draw(scores, self.noise(len(tokens), 0, scores.shape))[0])

    def noise(self, step: int, stream: int, shape: Sequence[int]) -> Tensor:
        """Exponential noise float32 of `shape` for `draw`: of this step, and of one use within it."""
        generator = torch.Generator().manual_seed(hash((self._seed, step, stream)) % 2**63)
        return torch.empty(*shape).exponential_(generator=generator)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if sampling.temperature not in (0.0, 1.0):
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


def draw(scores: Tensor, noise: Tensor) -> Tensor:
    """One token a row of `scores` `[rows, vocabulary]`, by an exponential race: the token whose noise over
    its probability is least."""
    return (scores.softmax(-1) / noise.to(scores.device)).argmax(-1)
