"""Frames, slices and codes: pure pieces of the built-in voice."""

from __future__ import annotations

import numpy as np
import pytest

from omni_async.stages.models.hibari.autoregressive import (
    decode_energy,
    decode_pitch,
    encode_energy,
    encode_pitch,
    with_neighbours,
)
from omni_async.stages.models.hibari.frames import CONTENT, FRAME_CHANNELS, Frames, assemble, join
from omni_async.stages.models.hibari.noise import FrameNoise
from omni_async.stages.models.hibari.slices import FIRST_SLICES, SLICE, SentenceSlices


def make_frames(count: int, start: int = 0) -> Frames:
    """Frames that carry their own position as pitch."""
    position = np.arange(start, start + count, dtype=np.float32)
    return Frames(np.repeat(position[:, None], FRAME_CHANNELS, 1), position)


@pytest.mark.parametrize("factor", [0.25, 0.7, 1.0, 1.3, 2.0, 4.0])
@pytest.mark.parametrize("sizes", [[100], [1] * 100, [3, 40, 57]])
def test_retiming_in_pieces_is_retiming_whole(factor: float, sizes: list[int]) -> None:
    starts = np.cumsum([0, *sizes[:-1]])
    parts = [make_frames(n, int(at)).retimed(factor, int(at)) for n, at in zip(sizes, starts, strict=True)]
    assert np.array_equal(join(parts).pitch, make_frames(100).retimed(factor).pitch)


def test_retiming_scales_length_and_keeps_pitch() -> None:
    frames = make_frames(100)
    assert len(frames.retimed(4.0)) == 25
    assert len(frames.retimed(0.25)) == 400
    assert set(frames.retimed(0.3).pitch) == set(frames.pitch)


def test_another_pitch_is_in_the_frames_too() -> None:
    index = np.zeros(3, np.intp)
    pitch = np.array([0.0, 100.0, 200.0], np.float32)
    frames = assemble(np.ones((1, CONTENT), np.float32), index, pitch, np.zeros(3, np.float32))
    higher = frames.pitched(1.25)
    assert higher.pitch.tolist() == [0.0, 125.0, 250.0]
    assert np.allclose(higher.values[:, CONTENT], np.log(1 + higher.pitch) / 5)
    assert frames.pitch.tolist() == [0.0, 100.0, 200.0]


@pytest.mark.parametrize("total", [1, 46, 47, 48, 127, 128, 287, 288, 600])
def test_slices_depend_on_position_alone(total: int) -> None:
    at_once, bit_by_bit = SentenceSlices(), SentenceSlices()
    at_once.add(make_frames(total))
    at_once.complete = True
    expected = list(take_all(at_once))
    found: list[tuple[int, bool, bool]] = []
    for at in range(total):
        bit_by_bit.add(make_frames(1, at))
        bit_by_bit.complete = at == total - 1
        found += take_all(bit_by_bit)
    assert found == expected
    assert sum(size for size, _, _ in found) == total
    assert [first for _, first, _ in found] == [True] + [False] * (len(found) - 1)
    assert [size for size, _, last in found if not last] == [*FIRST_SLICES, SLICE, SLICE][: len(found) - 1]


def take_all(slices: SentenceSlices) -> list[tuple[int, bool, bool]]:
    """Sizes and ends of the slices that can be taken now."""
    found: list[tuple[int, bool, bool]] = []
    while slices.missing <= 0 and not (found and found[-1][2]):
        piece = slices.take()
        found.append((len(piece.frames), piece.first, piece.last))
    return found


def test_codes_come_back_within_half_a_step() -> None:
    hertz = np.array([0.0, 30.0, 80.0, 100.0, 222.0, 360.0], np.float32)
    again = decode_pitch(encode_pitch(hertz))
    assert again[:2].tolist() == [0.0, 0.0]
    assert np.abs(again[2:] / hertz[2:] - 1).max() < 0.0125
    energy = np.linspace(-10, 10, 101, dtype=np.float32)
    assert np.abs(decode_energy(encode_energy(energy)) - energy).max() < 0.16


def test_what_is_out_of_range_is_taken_to_its_end() -> None:
    assert decode_pitch(encode_pitch(np.array([41.0, 900.0], np.float32))).tolist() == pytest.approx(
        [80, 360]
    )
    assert encode_energy(np.array([-99.0, 99.0], np.float32)).tolist() == [0, 63]


def test_a_phoneme_sees_its_neighbours_and_at_the_ends_itself() -> None:
    text = np.arange(3, dtype=np.float32)[:, None]
    assert with_neighbours(text).tolist() == [[0, 1, 0], [1, 2, 0], [2, 2, 1]]


def test_noise_in_pieces_is_noise_whole_and_follows_the_seed() -> None:
    whole, pieces = FrameNoise(7)(100), FrameNoise(7)
    assert np.array_equal(np.concatenate([pieces(1), pieces(60), pieces(39)]), whole)
    assert not np.array_equal(FrameNoise(8)(100), whole)


def test_noise_is_white_and_of_unit_variance() -> None:
    noise = FrameNoise(1)(400)
    assert noise.real.std() == pytest.approx(1, abs=0.02)
    assert noise.imag.std() == pytest.approx(1, abs=0.02)
    between = np.mean(noise[1:] * noise[:-1].conj())
    assert abs(between) < 0.02
