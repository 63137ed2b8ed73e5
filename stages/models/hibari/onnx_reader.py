"""The initializers of an ONNX file, read without the `onnx` package.

An ONNX file is a protobuf; only the few fields that lead to constant tensors are followed
(ModelProto.graph = 7, GraphProto.initializer = 5, TensorProto as in onnx.proto3).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DTYPES: dict[int, type[np.generic]] = {
    1: np.float32,
    2: np.uint8,
    3: np.int8,
    6: np.int32,
    7: np.int64,
}

Field = tuple[int, int | memoryview]


def read_initializers(path: Path) -> dict[str, NDArray[Any]]:
    """Every constant tensor of the file's graph, by name. Raises `ValueError` for another dtype."""
    model = memoryview(path.read_bytes())
    graph = next(value for number, value in _fields(model) if number == 7 and isinstance(value, memoryview))
    tensors = (value for number, value in _fields(graph) if number == 5 and isinstance(value, memoryview))
    return dict(map(_tensor, tensors))


def _tensor(data: memoryview) -> tuple[str, NDArray[Any]]:
    dims: list[int] = []
    dtype, name = 1, ""
    raw: memoryview | None = None
    ints: list[int] = []
    floats = b""
    for number, value in _fields(data):
        match number:
            case 1:
                dims += _ints(value)
            case 2 if isinstance(value, int):
                dtype = value
            case 4 if isinstance(value, memoryview):
                floats += bytes(value)
            case 5:
                ints += _ints(value)
            case 8 if isinstance(value, memoryview):
                name = bytes(value).decode()
            case 9 if isinstance(value, memoryview):
                raw = value
            case _:
                pass
    if dtype not in _DTYPES:
        raise ValueError(f"{name}: ONNX data type {dtype} is not read here")
    if raw is not None:
        return name, np.frombuffer(raw, _DTYPES[dtype]).reshape(dims)
    if floats:
        return name, np.frombuffer(floats, np.float32).reshape(dims)
    return name, np.array(ints, _DTYPES[dtype]).reshape(dims)


def _ints(value: int | memoryview) -> list[int]:
    """A repeated integer field, packed or not."""
    if isinstance(value, int):
        return [value]
    found, at = [], 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found


def _fields(data: memoryview) -> Iterator[Field]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        else:
            size = {_FIXED64: 8, _FIXED32: 4}[wire]
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, at
        shift += 7
