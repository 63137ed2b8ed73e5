"""What an ONNX file holds, read without the `onnx` package.

An ONNX file is a protobuf; only the few fields that lead to nodes and constant tensors are followed
(ModelProto.graph = 7, GraphProto.node = 1 and initializer = 5, as in onnx.proto3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
DTYPES: dict[int, type[np.generic]] = {
    1: np.float32,
    2: np.uint8,
    3: np.int8,
    6: np.int32,
    7: np.int64,
}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation: the names that it reads and makes, and its encoded form."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    encoded: memoryview


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph's parts by name, still encoded: `inputs` and `values` tell shapes, of the graph's inputs and
    of what is made between."""

    nodes: tuple[Node, ...]
    initializers: dict[str, memoryview]
    inputs: dict[str, memoryview]
    values: dict[str, memoryview]


def read_graph(model: bytes) -> Graph:
    """The main graph of an encoded ModelProto."""
    encoded = next(_bytes_fields(memoryview(model), 7))
    return Graph(
        nodes=tuple(map(_node, _bytes_fields(encoded, 1))),
        initializers={_name(tensor, 8): tensor for tensor in _bytes_fields(encoded, 5)},
        inputs={_name(value, 1): value for value in _bytes_fields(encoded, 11)},
        values={_name(value, 1): value for value in _bytes_fields(encoded, 13)},
    )


def read_tensor(encoded: memoryview) -> NDArray[Any]:
    """An initializer as an array. Raises `ValueError` for a dtype that is not read here."""
    dims: list[int] = []
    dtype = 1
    raw, floats = b"", b""
    ints: list[int] = []
    for number, value in fields(encoded):
        match number:
            case 1:
                dims += _ints(value)
            case 2 if isinstance(value, int):
                dtype = value
            case 4 if isinstance(value, memoryview):
                floats += bytes(value)
            case 5:
                ints += _ints(value)
            case 9 if isinstance(value, memoryview):
                raw = bytes(value)
            case _:
                pass
    if dtype not in DTYPES:
        raise ValueError(f"ONNX data type {dtype} is not read here")
    if ints:
        return np.array(ints).astype(DTYPES[dtype]).reshape(dims)
    return np.frombuffer(raw or floats, DTYPES[dtype]).reshape(dims)


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Number and value of each field of an encoded protobuf message."""
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


def _bytes_fields(data: memoryview, wanted: int) -> Iterator[memoryview]:
    for number, value in fields(data):
        if number == wanted and isinstance(value, memoryview):
            yield value


def _node(encoded: memoryview) -> Node:
    inputs = tuple(bytes(name).decode() for name in _bytes_fields(encoded, 1))
    outputs = tuple(bytes(name).decode() for name in _bytes_fields(encoded, 2))
    return Node(inputs, outputs, encoded)


def _name(encoded: memoryview, number: int) -> str:
    return bytes(next(_bytes_fields(encoded, number))).decode()


def _ints(value: int | memoryview) -> list[int]:
    """A repeated integer field, packed or not."""
    if isinstance(value, int):
        return [value]
    found: list[int] = []
    at = 0
    while at < len(value):
        number, at = _varint(value, at)
        found.append(number)
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        if byte < 128:
            return result, at
        shift += 7
