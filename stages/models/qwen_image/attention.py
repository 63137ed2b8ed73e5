"""Qwen-Image's attention for a batch whose rows differ in length: the library's own takes one set of
positions for all rows, and no mask for pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from torch.nn.utils.rnn import pad_sequence

Tensor = torch.Tensor
Shape = Sequence[tuple[int, int, int]]


def positions_by_row(embed: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`embed`, which gives the rotations of one row, for rows of several shapes: `[rows, tokens, …]`."""

    def forward(shapes: Sequence[Shape], **arguments: Any) -> tuple[Tensor, Tensor]:
        if all(shape == shapes[0] for shape in shapes):
            return embed(shapes, **arguments)
        rows = [embed([shape], **arguments) for shape in shapes]
        pictures = pad_sequence([row[0] for row in rows], batch_first=True, padding_value=1.0)
        return pictures, torch.stack([row[1] for row in rows])

    return forward


class RowAttention(QwenDoubleStreamAttnProcessor2_0):
    """The library's processor until rows differ; then the same with positions of each row, and
    `image_mask` `[rows, tokens]` over the pictures' padding."""

    image_mask: Tensor | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Any,
        encoder_hidden_states: Any = None,
        encoder_hidden_states_mask: Any = None,
        attention_mask: Any = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """The picture's and the text's new hidden states."""
        rotations, text_rotations = image_rotary_emb
        if rotations.ndim == 2 and self.image_mask is None:
            return super().__call__(
                attn,
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                attention_mask,
                image_rotary_emb,
            )
        width = attn.inner_dim // attn.heads
        picture = (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k), rotations
        text = (
            (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k),
            text_rotations,
        )
        streams = [
            _project(encoder_hidden_states, *text, width),
            _project(hidden_states, *picture, width),
        ]
        query, key, value = (torch.cat(pair, 1) for pair in zip(*streams, strict=True))
        mask = torch.cat(
            [
                _whole(encoder_hidden_states_mask, encoder_hidden_states),
                _whole(self.image_mask, hidden_states),
            ],
            1,
        )
        out = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=mask[:, None, None, :],
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        words, patches = out.flatten(2, 3).to(query.dtype).tensor_split([encoder_hidden_states.shape[1]], 1)
        for layer in attn.to_out:
            patches = layer(patches.contiguous())
        return patches, attn.to_add_out(words.contiguous())


def _project(
    hidden: Tensor, layers: Sequence[Any], norms: Sequence[Any], rotations: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value `[rows, tokens, heads, width]`, the first two normed and rotated."""
    query, key, value = (layer(hidden).unflatten(-1, (-1, width)) for layer in layers)
    return _rotate(norms[0](query), rotations), _rotate(norms[1](key), rotations), value


def _rotate(heads: Tensor, rotations: Tensor) -> Tensor:
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations.unsqueeze(-2)).flatten(3).type_as(heads)


def _whole(mask: Tensor | None, hidden: Tensor) -> Tensor:
    return hidden.new_ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
