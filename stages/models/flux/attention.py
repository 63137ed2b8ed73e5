"""FLUX's attention for a batch whose rows differ in size: the library's own takes one set of positions
for all rows."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, _get_qkv_projections
from torch.nn.utils.rnn import pad_sequence

Tensor = torch.Tensor


class RowPositions:
    """Stands in for the forward of a `FluxPosEmbed`: rotations `[rows, tokens, width]` where rows have
    positions of their own, else the library's `[tokens, width]`."""

    embed: Callable[[Tensor], tuple[Tensor, Tensor]]

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    @contextmanager
    def of(self, rows: Sequence[tuple[Tensor, Tensor]]) -> Generator[None, None, None]:
        """Inside, each row has the positions of its text and its picture."""
        first = rows[0]
        if not all(same(text, first[0]) and same(picture, first[1]) for text, picture in rows):
            self._rows = [torch.cat(row) for row in rows]
        try:
            yield
        finally:
            self._rows = []

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if not self._rows:
            return self.embed(ids)
        rows = [self.embed(each) for each in self._rows]
        cosines, sines = ([row[part] for row in rows] for part in (0, 1))
        return pad_sequence(cosines, batch_first=True), pad_sequence(sines, batch_first=True)


def same(some: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, of whatever shapes."""
    return some is other or (some.shape == other.shape and torch.equal(some, other))


class RowAttention(FluxAttnProcessor):
    """The library's processor, or the same with rotations of each row."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """The picture's new hidden states, and the text's where the streams are apart."""
        if image_rotary_emb[0].ndim == 2:
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        projected: Any = _get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        query, key, value, *text = (
            each.unflatten(-1, (-1, attn.head_dim)) for each in projected if each is not None
        )
        query, key = attn.norm_q(query), attn.norm_k(key)
        if encoder_hidden_states is not None:
            query = torch.cat([attn.norm_added_q(text[0]), query], 1)
            key = torch.cat([attn.norm_added_k(text[1]), key], 1)
            value = torch.cat([text[2], value], 1)
        out = dispatch_attention_fn(
            _rotate(query, image_rotary_emb),
            _rotate(key, image_rotary_emb),
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        out = out.flatten(2, 3).to(query.dtype)
        if encoder_hidden_states is None:
            return out
        words, patches = out.tensor_split([encoder_hidden_states.shape[1]], 1)
        for layer in attn.to_out:
            patches = layer(patches.contiguous())
        return patches, attn.to_add_out(words.contiguous())


def _rotate(heads: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = (each[:, :, None, :] for each in rotations)
    real, imaginary = heads.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-imaginary, real], -1).flatten(3)
    return (heads.float() * cosine + turned.float() * sine).to(heads.dtype)
