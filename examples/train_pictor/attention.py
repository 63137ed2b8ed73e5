"""The transformer's joint attention with a mask, which diffusers' own processor ignores.

Training needs it to let one token stand for many. The weights are the stock ones, so what is exported runs
with the stock processor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def standing_for(count: int, tokens: int) -> Tensor:
    """A mask over `tokens` keys with which the last weighs as much as `count` equal ones.

    Softmax sums `count · exp(score)` for equal keys, which is `exp(score + log count)` for one. Tokens of a
    caption carry no position, so equal ones stay equal through all layers, and the result is exact.
    """
    mask = torch.zeros(1, 1, 1, tokens)
    mask[..., -1] = math.log(count)
    return mask


class MaskedJointAttention:
    """Like `JointAttnProcessor2_0`: picture and caption attend to each other, but the mask counts."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """New `[rows, patches, width]` and `[rows, tokens, width]`; `attn` is diffusers' `Attention`."""
        pairs = zip(_of_picture(attn, hidden_states), _of_caption(attn, encoder_hidden_states), strict=True)
        query, key, value = (torch.cat(pair, 2) for pair in pairs)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        mixed = mixed.transpose(1, 2).flatten(2)
        patches = hidden_states.shape[1]
        picture, caption = mixed[:, :patches], mixed[:, patches:]
        if not attn.context_pre_only:
            caption = attn.to_add_out(caption)
        return attn.to_out[0](picture), caption


def _of_picture(attn: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key = _heads(attn, attn.to_q(states)), _heads(attn, attn.to_k(states))
    return attn.norm_q(query), attn.norm_k(key), _heads(attn, attn.to_v(states))


def _of_caption(attn: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key = _heads(attn, attn.add_q_proj(states)), _heads(attn, attn.add_k_proj(states))
    return attn.norm_added_q(query), attn.norm_added_k(key), _heads(attn, attn.add_v_proj(states))


def _heads(attn: Any, states: Tensor) -> Tensor:
    """`[rows, tokens, width]` → `[rows, heads, tokens, width / heads]`."""
    return states.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
