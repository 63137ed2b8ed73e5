"""The residual codes of a frame: the code predictor, run for all rows of a step together.

It is a small transformer over at most as many positions as there are code groups, begun anew for each frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omni_async.stages.ar.cache import RaggedCache
from omni_async.stages.ar.sampling import Sampler, Sampling, draw

SAMPLED = Sampling(top_k=50, top_p=0.8)
"""How transformers' `generate` draws residual codes when it draws the first code of a frame."""


class CodePredictor:
    """Wraps transformers' module; `slots` rows at most."""

    def __init__(self, module: Any, slots: int) -> None:
        self._heads = list(module.lm_head)
        self._embeddings = list(module.get_input_embeddings())
        self._layers = list(module.model.layers)
        self._norm = module.model.norm
        config = module.config
        weight = module.lm_head[0].weight
        self.cache = RaggedCache(
            len(self._layers),
            slots,
            config.num_key_value_heads,
            config.head_dim,
            dtype=weight.dtype,
            device=str(weight.device),
            capacity=len(self._heads) + 1,
        )
        places = torch.arange(len(self._heads) + 1, device=weight.device)[None]
        self._cos, self._sin = module.model.rotary_emb(weight, places)

    def residuals(self, hidden: Tensor, first: Tensor, samplers: Sequence[tuple[Sampler, int]]) -> Any:
        """The residual codes int64 `[rows, groups - 1]`, and the sum of all codes' embeddings.

        `hidden` is the talker's output, `first` the embedding of the first code; they and the sum are
        `[rows, width]`;
        `samplers` are the rows' own, each with the number of its step.
        """
        rows = range(len(hidden))
        # Position 0 alone and then 1: the same as both at once, in the shape of all steps that follow.
        self._forward(hidden, rows, 0)
        embed, total, codes = first, first, []
        for group, head in enumerate(self._heads):
            logits = head(self._forward(embed, rows, group + 1))
            codes.append(self._choose(logits, group, samplers))
            embed = self._embeddings[group](codes[-1])
            total = total + embed
        return torch.stack(codes, dim=1), total

    def _forward(self, embed: Tensor, rows: Sequence[int], place: int) -> Tensor:
        view = self.cache.view(rows, [place] * len(rows))
        angles = self._cos[:, place : place + 1], self._sin[:, place : place + 1]
        hidden = embed[:, None]
        for layer in self._layers:
            # Nothing is masked: every row has exactly the positions that are read.
            hidden = layer(hidden, attention_mask=None, position_embeddings=angles, past_key_values=view)
        return self._norm(hidden)[:, 0]

    def _choose(self, logits: Tensor, group: int, samplers: Sequence[tuple[Sampler, int]]) -> Tensor:
        chosen = logits.argmax(-1)
        for row, (sampler, step) in enumerate(samplers):
            if sampler.sampling.temperature > 0:
                scores = _kept(logits[row : row + 1].float())
                chosen[row] = draw(scores, sampler.noise(step, group + 1, scores.shape))[0]
        return chosen


_WARPERS = Sampler(SAMPLED, 0).warpers


def _kept(scores: Tensor) -> Tensor:
    return _WARPERS(None, scores)  # pyright: ignore[reportArgumentType]
