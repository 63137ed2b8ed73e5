"""Tensors between processes: the arena, its reader, and the rule of what goes there."""

from omni_async.transports.arena import Arena
from omni_async.transports.arena_reader import ArenaReader, nbytes
from omni_async.transports.tensors import INLINE_LIMIT, pack, unpack

__all__ = ["INLINE_LIMIT", "Arena", "ArenaReader", "nbytes", "pack", "unpack"]
