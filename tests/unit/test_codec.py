"""Messages survive the codec, and nothing else gets through it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from omni_async.errors import ErrorInfo
from omni_async.messages import (
    Abort,
    Configure,
    Consumed,
    Credit,
    Failed,
    Fatal,
    Heartbeat,
    Hello,
    Input,
    Output,
    Ready,
    Stop,
    Submit,
    TensorRef,
)
from omni_async.transports.codec import MalformedMessage, engine_codec, heartbeat_codec, worker_codec
from omni_async.transports.shm import pack, unpack

numbers = st.integers(0, 2**63)
seconds = st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | seconds | st.text() | st.binary()
metas = st.dictionaries(st.text(), st.recursive(scalars, st.lists, max_leaves=8), max_size=4)
lengths = st.lists(numbers, max_size=3).map(tuple)
refs = st.builds(TensorRef, st.text(), lengths, numbers, st.text(), numbers)
tensors = st.dictionaries(st.text(), refs, max_size=3)
errors = st.builds(ErrorInfo, kind=st.text(), message=st.text(), retry_after=st.none() | seconds)

to_worker = (
    st.builds(Configure, stage=metas, arena_bytes=numbers, inline_limit=numbers)
    | st.builds(
        Submit,
        request=numbers,
        params=metas,
        seed=numbers,
        window=numbers,
        due_in=seconds,
        public_id=st.text(),
        tensors=tensors,
    )
    | st.builds(
        Input,
        request=numbers,
        source=st.text(),
        seq=numbers,
        meta=metas,
        tensors=tensors,
        final=st.booleans(),
    )
    | st.builds(Credit, request=numbers, upto=numbers, due_in=seconds)
    | st.builds(Abort, request=numbers)
    | st.just(Stop())
)
to_engine = (
    st.builds(Hello, pid=numbers)
    | st.builds(Ready, load_seconds=seconds)
    | st.builds(Output, request=numbers, seq=numbers, meta=metas, tensors=tensors, duration=seconds)
    | st.builds(Consumed, request=numbers, source=st.text(), upto=numbers)
    | st.builds(Failed, request=numbers, error=errors)
    | st.builds(Fatal, error=errors)
)
frame_lists = st.lists(st.binary(max_size=64), max_size=4)


@given(to_worker, frame_lists)
def test_what_the_engine_says_reaches_the_worker_unchanged(message: Any, frames: list[bytes]) -> None:
    decoded, views = worker_codec().decode(engine_codec().encode(message, frames))
    assert decoded == message
    assert [bytes(view) for view in views] == frames


@given(to_engine, frame_lists)
def test_what_a_worker_says_reaches_the_engine_unchanged(message: Any, frames: list[bytes]) -> None:
    decoded, views = engine_codec().decode(worker_codec().encode(message, frames))
    assert decoded == message
    assert [bytes(view) for view in views] == frames


def test_payload_frames_are_passed_on_without_a_copy_and_read_only() -> None:
    payload = bytearray(b"before")
    _, views = worker_codec().decode(engine_codec().encode(Abort(request=1), [payload]))
    payload[:] = b"after!"
    assert bytes(views[0]) == b"after!"
    assert views[0].readonly


@given(st.lists(st.binary(max_size=64), max_size=3))
@example([])
@example([b""])
@example([b"\xc1"])
@example([b"\x91" * 5000])
@example([b"\xa2\xff\xfe"])
def test_frames_that_are_no_message_raise_the_one_named_exception(frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        engine_codec().decode(frames)


@given(to_engine, st.data())
def test_a_truncated_header_is_refused(message: Any, data: st.DataObject) -> None:
    header = bytes(worker_codec().encode(message)[0])
    cut = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(MalformedMessage):
        engine_codec().decode([header[:cut]])


def test_a_message_of_the_other_direction_is_refused_at_both_ends() -> None:
    with pytest.raises(TypeError, match="Abort is not a message of this channel"):
        worker_codec().encode(Abort(request=1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(MalformedMessage):
        worker_codec().decode(worker_codec().encode(Hello(pid=1)))


def test_a_field_of_the_wrong_type_is_refused() -> None:
    header = msgspec.msgpack.encode({"type": "Hello", "pid": "many"})
    with pytest.raises(MalformedMessage, match="pid"):
        engine_codec().decode([header])


def test_what_msgpack_cannot_carry_is_refused_when_it_is_sent() -> None:
    with pytest.raises(TypeError):
        worker_codec().encode(Output(request=1, seq=0, meta={"model": object()}))
    with pytest.raises(OverflowError):
        worker_codec().encode(Output(request=1, seq=0, meta={"big": 2**64}))


def test_heartbeats_have_a_codec_of_their_own() -> None:
    beat = Heartbeat(replica="talker.0", steps=3, running=2, last_step_age=0.5, busy_seconds=0.1)
    assert heartbeat_codec().decode(heartbeat_codec().encode(beat)) == (beat, [])
    with pytest.raises(MalformedMessage):
        heartbeat_codec().decode(worker_codec().encode(Hello(pid=1)))


dtypes = st.sampled_from(["bool", "uint8", "int16", ">i4", "int64", "float16", "float32", ">f8", "complex64"])
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))


@given(st.dictionaries(st.text(), arrays, max_size=3))
def test_arrays_survive_as_inline_frames_whatever_their_layout(given_arrays: dict[str, Any]) -> None:
    laid_out = {name: array.T for name, array in given_arrays.items()}
    refs, frames = pack(laid_out, arena=None, request=1, seq=0)
    message = Output(request=1, seq=0, tensors=refs)
    decoded, views = engine_codec().decode(worker_codec().encode(message, frames))
    assert isinstance(decoded, Output)
    result = unpack(decoded.tensors, views, None)
    assert result.keys() == laid_out.keys()
    for name, array in result.items():
        np.testing.assert_array_equal(array, laid_out[name])
        assert array.dtype == laid_out[name].dtype.newbyteorder("=")
        assert array.shape == laid_out[name].shape
        assert not array.flags.writeable


@pytest.mark.parametrize(
    ("ref", "match"),
    [
        (TensorRef("float32", (2,), frame=1), "frame 1 of 1"),
        (TensorRef("float32", (2,), frame=-1), "frame -1"),
        (TensorRef("float32", (3,)), "8 bytes is not a float32 tensor"),
        (TensorRef("float32", (-2,)), "negative"),
        (TensorRef("float32", (-1, -2)), "negative"),
        (TensorRef("object", (1,)), "not sent"),
        (TensorRef("nonsense", (1,)), "not a dtype"),
        (TensorRef("(2,", (1,)), "not a dtype"),
        (TensorRef("uint8", (2**40, 2**40)), "8 bytes"),
        (TensorRef("uint8", (8,), segment="w.arena"), "no shared memory"),
    ],
)
def test_a_reference_that_does_not_fit_its_frame_is_refused(ref: TensorRef, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        unpack({"x": ref}, [b"12345678"], None)


def test_empty_dimensions_beyond_any_address_space_are_refused() -> None:
    with pytest.raises(ValueError, match=r"does not fit|too big|dimension"):
        unpack({"x": TensorRef("uint8", (0, 2**63))}, [b""], None)


def test_a_frame_at_an_odd_address_gives_an_aligned_array() -> None:
    frame = memoryview(b"x" + np.arange(4, dtype=np.float32).tobytes())[1:]
    array = unpack({"x": TensorRef("float32", (4,))}, [frame], None)["x"]
    assert array.flags.aligned
    assert not array.flags.writeable
    np.testing.assert_array_equal(array, [0, 1, 2, 3])


def test_a_dtype_that_cannot_be_sent_is_refused_before_anything_is_packed() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        pack({"x": np.array(["text"])}, arena=None, request=1, seq=0)
