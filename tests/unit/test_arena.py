"""Leases in shared memory: data stays intact, space comes back, and full means inline."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.messages import TensorRef
from omni_async.transports import arena as arena_module
from omni_async.transports.free_list import ALIGNMENT, FreeList, aligned
from omni_async.transports.run_dir import RunDir
from omni_async.transports.shm import Arena, ArenaReader, pack, unpack

MIB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    run_dir = RunDir.create()
    if not run_dir.in_shared_memory:
        pytest.fail("these tests need /dev/shm")
    yield run_dir.path
    run_dir.remove()


@pytest.fixture
def reader(folder: Path) -> Iterator[ArenaReader]:
    reader = ArenaReader(folder)
    yield reader
    reader.close()


@pytest.fixture
def arena(folder: Path) -> Iterator[Arena]:
    arena = Arena(folder, "talker.0-1", 16 * MIB)
    yield arena
    arena.check()
    arena.close()


def put(arena: Arena, request: int, seq: int, array: Any) -> TensorRef:
    ref = arena.put(request, seq, array)
    assert ref is not None
    return ref


def test_a_tensor_is_read_where_it_was_put(arena: Arena, reader: ArenaReader) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    view = reader.view(put(arena, 1, 0, array.T))
    np.testing.assert_array_equal(view, array.T)
    assert view.ctypes.data % ALIGNMENT == 0
    assert not view.flags.writeable


def test_views_are_not_copies(arena: Arena, reader: ArenaReader) -> None:
    ref = put(arena, 1, 0, np.zeros(8, np.uint8))
    view = reader.view(ref)
    arena.release(1, 1)
    assert put(arena, 2, 0, np.full(8, 7, np.uint8)) == ref
    assert view.tolist() == [7] * 8


def test_scalars_and_empty_arrays_can_be_leased(arena: Arena, reader: ArenaReader) -> None:
    assert reader.view(put(arena, 1, 0, np.array(2.5))) == 2.5
    assert reader.view(put(arena, 1, 0, np.zeros((0, 3), np.int16))).shape == (0, 3)


def test_release_frees_the_chunks_below_and_keeps_the_others(arena: Arena, reader: ArenaReader) -> None:
    refs = [put(arena, 1, seq, np.full(1000, seq, np.uint8)) for seq in range(4)]
    put(arena, 2, 0, np.zeros(1000))
    arena.release(1, 2)
    arena.check()
    assert arena.used == 2 * aligned(1000) + aligned(8000)
    assert [reader.view(ref)[0] for ref in refs[2:]] == [2, 3]


def test_release_frees_every_tensor_of_a_chunk_and_may_be_repeated(arena: Arena) -> None:
    for _ in range(3):
        put(arena, 1, 0, np.zeros(100))
    for _ in range(2):
        arena.release(1, 1)
        arena.check()
    assert arena.used == 0


def test_drop_frees_one_request_and_no_other(arena: Arena) -> None:
    for request in (1, 2):
        for seq in range(3):
            put(arena, request, seq, np.zeros(64, np.uint8))
    arena.drop(1)
    arena.drop(1)
    assert arena.used == 3 * 64
    arena.drop(404)
    arena.release(404, 5)
    assert arena.used == 3 * 64


def test_a_dtype_without_a_fixed_meaning_is_refused_and_nothing_is_leased(arena: Arena) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        arena.put(1, 0, np.array([object()]))
    assert arena.used == 0


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 4), st.integers(0, 300_000)),
        st.tuples(st.just("release"), st.integers(0, 4), st.integers(0, 8)),
        st.tuples(st.just("drop"), st.integers(0, 4), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(operations)
def test_leased_data_stays_intact_whatever_is_put_released_and_dropped(
    steps: list[tuple[str, int, int]],
) -> None:
    run_dir = RunDir.create()
    arena, reader = Arena(run_dir.path, "w", MIB), ArenaReader(run_dir.path)
    live: dict[int, list[tuple[int, TensorRef, Any]]] = {request: [] for request in range(5)}
    sent = dict.fromkeys(live, 0)
    try:
        for index, (verb, request, number) in enumerate(steps):
            if verb == "put":
                array = np.full(number, index, np.uint8)
                ref = arena.put(request, sent[request], array)
                if ref is not None:
                    live[request].append((sent[request], ref, array))
                sent[request] += 1
            elif verb == "release":
                arena.release(request, number)
                live[request] = [lease for lease in live[request] if lease[0] >= number]
            else:
                arena.drop(request)
                live[request] = []
            arena.check()
            for held in live.values():
                for _, ref, array in held:
                    np.testing.assert_array_equal(reader.view(ref), array)
        assert arena.used == sum(aligned(array.nbytes) for held in live.values() for _, _, array in held)
    finally:
        reader.close()
        arena.close()
        run_dir.remove()


def test_memory_is_reserved_when_needed_and_reused_when_released(folder: Path) -> None:
    arena = Arena(folder, "w", 64 * MIB)
    assert [arena.reserved, list(folder.glob("*.arena"))] == [0, []]
    for seq in range(50):
        put(arena, 1, seq, np.zeros(MIB, np.uint8))
        arena.release(1, seq + 1)
    assert arena.reserved == arena_module.FIRST_GROWTH
    put(arena, 1, 50, np.zeros(9 * MIB, np.uint8))
    assert 9 * MIB <= arena.reserved <= 16 * MIB
    arena.check()
    arena.close()


def test_the_space_is_really_reserved(folder: Path) -> None:
    arena = Arena(folder, "w", 64 * MIB)
    put(arena, 1, 0, np.zeros(100, np.uint8))
    (path,) = folder.glob("*.arena")
    assert path.stat().st_blocks * 512 >= arena.reserved > 0
    arena.close()


def test_an_array_larger_than_what_is_left_gets_no_lease(arena: Arena) -> None:
    assert arena.put(1, 0, np.zeros(16 * MIB + 1, np.uint8)) is None
    assert arena.reserved == 0
    put(arena, 1, 0, np.zeros(16 * MIB, np.uint8))
    assert arena.put(1, 1, np.zeros(1, np.uint8)) is None
    arena.release(1, 1)
    put(arena, 1, 2, np.zeros(16 * MIB, np.uint8))


def test_an_odd_capacity_is_used_up_to_the_last_whole_unit(folder: Path) -> None:
    arena = Arena(folder, "w", 5 * MIB + 100)
    put(arena, 1, 0, np.zeros(5 * MIB, np.uint8))
    put(arena, 1, 1, np.zeros(64, np.uint8))
    assert arena.put(1, 2, np.zeros(64, np.uint8)) is None
    arena.check()
    arena.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_a_full_shared_memory_means_inline_frames(
    arena: Arena, reader: ArenaReader, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    array = np.arange(MIB, dtype=np.int32)
    refs, frames = pack({"x": array}, arena=arena, request=1, seq=0)
    assert [refs["x"].segment, len(frames)] == ["", 1]
    np.testing.assert_array_equal(unpack(refs, frames, reader)["x"], array)
    arena.check()
    monkeypatch.undo()
    assert put(arena, 1, 1, array).segment


def test_another_error_of_the_file_system_is_raised(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="broken"):
        arena.put(1, 0, np.zeros(8))


def test_a_reservation_that_cannot_succeed_is_not_tried(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve = Mock()
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    monkeypatch.setattr(os, "statvfs", Mock(return_value=Mock(f_blocks=16384, f_frsize=4096, f_bavail=0)))
    assert arena.put(1, 0, np.zeros(8)) is None
    reserve.assert_not_called()


def test_outside_shared_memory_there_are_only_inline_frames(tmp_path: Path) -> None:
    arena = Arena(tmp_path, "w", 64 * MIB)
    assert arena.put(1, 0, np.zeros(MIB)) is None
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_close_unlinks_the_file_and_held_views_stay_readable(folder: Path) -> None:
    arena, reader = Arena(folder, "w", MIB), ArenaReader(folder)
    view = reader.view(put(arena, 1, 0, np.full(100, 9)))
    arena.close()
    arena.close()
    reader.close()
    assert list(folder.glob("*.arena")) == []
    assert view.tolist() == [9] * 100
    assert arena.put(1, 1, np.zeros(8)) is None


def test_small_arrays_ride_along_and_large_ones_stay_in_the_arena(arena: Arena, reader: ArenaReader) -> None:
    arrays = {"small": np.arange(4096, dtype=np.float32), "large": np.arange(4097, dtype=np.float32)}
    refs, frames = pack(arrays, arena=arena, request=1, seq=0)
    assert [refs["small"].segment, len(frames)] == ["", 1]
    assert refs["large"].segment
    for name, array in unpack(refs, frames, reader).items():
        np.testing.assert_array_equal(array, arrays[name])


def test_packing_refuses_a_bad_array_before_it_leases_a_good_one(arena: Arena) -> None:
    arrays = {"good": np.zeros(MIB), "bad": np.array([None])}
    with pytest.raises(TypeError):
        pack(arrays, arena=arena, request=1, seq=0)
    assert arena.used == 0


def test_holes_that_meet_become_one() -> None:
    space = FreeList()
    space.grow(64 * 4)
    offsets = [space.take(64) for _ in range(4)]
    assert offsets == [0, 64, 128, 192]
    for offset in (0, 128, 64):
        space.give(offset, 64)
        space.check()
    assert [space.take(192), space.tail] == [0, 0]
    space.give(192, 64)
    assert space.tail == 64


@pytest.mark.parametrize("span", [(0, 64), (64, 128), (-64, 64), (192, 128), (128, 0)])
def test_freeing_what_is_not_in_use_raises_and_changes_nothing(span: tuple[int, int]) -> None:
    space = FreeList()
    space.grow(256)
    assert space.take(256) == 0
    space.give(0, 64)
    space.give(128, 64)
    with pytest.raises(ValueError, match=r"is not in the region|is free already"):
        space.give(*span)
    space.check()
    assert space.free == 128
