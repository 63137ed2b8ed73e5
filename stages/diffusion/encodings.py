"""Encoded texts, each made once for all requests that have it at the same time or shortly after."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from weakref import WeakValueDictionary

from omni_async.stages.diffusion.adapter import Adapter
from omni_async.stages.diffusion.state import DiffusionState, Encoding

Key = tuple[Hashable, ...]
Want = tuple[Key, str, DiffusionState]
Encode = Callable[[Sequence[str], DiffusionState, bool], list[Encoding]]
"""Texts, a request they belong to, and whether they are negative prompts → their encodings."""


class Encodings:
    """Keeps an encoding while a request uses it, and the last `size` of them beyond that."""

    def __init__(self, size: int, *, batch: bool) -> None:
        self._by_key: WeakValueDictionary[Key, Encoding] = WeakValueDictionary()
        self._recent: deque[Encoding] = deque(maxlen=size)
        self._batch = batch

    def fill(self, states: Sequence[DiffusionState], encode: Encode) -> None:
        """Give each of `states` its encodings; those that are missing are made by as few calls of `encode`
        as their keys allow."""
        wants = {state.request.request: self._wants(state) for state in states}
        made: dict[Key, Encoding] = {}
        for together in self._missing([want for each in wants.values() for want in each]):
            (key, _, state), texts = together[0], [text for _, text, _ in together]
            encodings = encode(texts, state, bool(key[0]))
            for (key, _, _), encoding in zip(together, encodings, strict=True):
                made[key] = self._by_key[key] = encoding
                self._recent.append(encoding)
        for state in states:
            found = [made.get(key) or self._by_key[key] for key, _, _ in wants[state.request.request]]
            state.cond, state.uncond = found[0], found[1] if len(found) > 1 else None

    def _wants(self, state: DiffusionState) -> list[Want]:
        adapter = state.adapter
        common = (adapter.length_of(state.spec), adapter.media_key(state), state.lora)
        differ = type(adapter).encode_negatives is not Adapter.encode_negatives
        prompt, negative = adapter.texts_of(state)
        wants: list[Want] = [((False, *common, prompt), prompt, state)]
        if negative is not None:
            wants.append(((differ, *common, negative), negative, state))
        return wants

    def _missing(self, wants: Sequence[Want]) -> list[list[Want]]:
        groups: dict[Key, dict[Key, Want]] = {}
        for want in wants:
            key = want[0]
            if key not in self._by_key:
                groups.setdefault(key[:-1] if self._batch else key, {})[key] = want
        return [list(group.values()) for group in groups.values()]
