"""ONNX models written without the `onnx` package: graphs built node by node, or cut out of another."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_async.stages.models.hibari.onnx_reader import DTYPES, Graph, Node

IR_VERSION, OPSET, CONTRIB_OPSET = 8, 17, 1
CONTRIB = "com.microsoft"
_CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
_FLOAT = 1

Attribute = int | float | Sequence[int]
Shape = Sequence[int | str]


class GraphBuilder:
    """A graph under construction. Names are made up as it grows; node methods return output names."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._initializers: list[bytes] = []
        self._names = 0

    def constant(self, value: NDArray[Any] | float | int, dtype: Any = None) -> str:
        """A constant tensor."""
        array = np.ascontiguousarray(value, dtype)
        name = self._new_name()
        dims = b"".join(_field(1, dim) for dim in np.shape(value))
        self._initializers.append(
            dims + _field(2, _CODES[array.dtype]) + _field(8, name) + _field(9, array.tobytes())
        )
        return name

    def node(self, op: str, *inputs: str, domain: str = "", **attributes: Attribute) -> str:
        """An operation with one output."""
        return self.nodes(op, inputs, 1, domain=domain, **attributes)[0]

    def nodes(
        self, op: str, inputs: Sequence[str], outputs: int, *, domain: str = "", **attributes: Attribute
    ) -> list[str]:
        """An operation with several outputs."""
        made = [self._new_name() for _ in range(outputs)]
        self._nodes.append(
            b"".join(_field(1, name) for name in inputs)
            + b"".join(_field(2, name) for name in made)
            + _field(4, op)
            + b"".join(_field(5, _attribute(name, value)) for name, value in attributes.items())
            + _field(7, domain)
        )
        return made

    def model(self, inputs: Mapping[str, Shape], outputs: Sequence[str]) -> bytes:
        """The finished model; all its inputs and outputs are float32."""
        signature = [_value(name, shape) for name, shape in inputs.items()]
        return _model(nodes=self._nodes, initializers=self._initializers, inputs=signature, outputs=outputs)

    def _new_name(self) -> str:
        self._names += 1
        return f"t{self._names}"


def cut(graph: Graph, outputs: Sequence[str]) -> bytes:
    """The model that makes the float32 tensors `outputs` out of `graph`'s own inputs, node by node as
    they stand there. Raises `KeyError` when there is no such tensor."""
    makers = {name: node for node in graph.nodes for name in node.outputs}
    wanted: dict[int, Node] = {}
    read: set[str] = set()
    todo = list(outputs)
    while todo:
        name = todo.pop()
        if not name or name in read:  # an input left out has no name
            continue
        read.add(name)
        if name not in graph.initializers and name not in graph.inputs:
            wanted[id(makers[name])] = makers[name]
            todo += makers[name].inputs
    # The shapes go along: with them onnxruntime fuses the same nodes as in the whole graph, to the same bits.
    return _model(
        nodes=[bytes(node.encoded) for node in graph.nodes if id(node) in wanted],
        initializers=[bytes(tensor) for name, tensor in graph.initializers.items() if name in read],
        inputs=[bytes(value) for name, value in graph.inputs.items() if name in read],
        outputs=outputs,
        values=[bytes(value) for name, value in graph.values.items() if name in read.difference(outputs)],
    )


def _model(
    *,
    nodes: Iterable[bytes],
    initializers: Iterable[bytes],
    inputs: Iterable[bytes],
    outputs: Iterable[str],
    values: Iterable[bytes] = (),
) -> bytes:
    graph = b"".join(
        [
            *(_field(1, node) for node in nodes),
            _field(2, "graph"),
            *(_field(5, tensor) for tensor in initializers),
            *(_field(11, value) for value in inputs),
            *(_field(12, _value(name, None)) for name in outputs),
            *(_field(13, value) for value in values),
        ]
    )
    opsets = [("", OPSET), (CONTRIB, CONTRIB_OPSET)]
    imports = b"".join(_field(8, _field(1, domain) + _field(2, version)) for domain, version in opsets)
    return _field(1, IR_VERSION) + imports + _field(7, graph)


def _value(name: str, shape: Shape | None) -> bytes:
    """A float32 ValueInfoProto; a dimension is a size or a name."""
    tensor = _field(1, _FLOAT)
    if shape is not None:
        dims = [_field(1 if isinstance(dim, int) else 2, dim) for dim in shape]
        tensor += _field(2, b"".join(_field(1, dim) for dim in dims))
    return _field(1, name) + _field(2, _field(1, tensor))


def _attribute(name: str, value: Attribute) -> bytes:
    if isinstance(value, float):
        return _field(1, name) + _key(2, 5) + struct.pack("<f", value) + _field(20, 1)
    if isinstance(value, int):
        return _field(1, name) + _field(3, value) + _field(20, 2)
    return _field(1, name) + b"".join(_field(8, item) for item in value) + _field(20, 7)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _key(number, 0) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _key(number, 2) + _varint(len(data)) + data


def _key(number: int, wire: int) -> bytes:
    return _varint(number << 3 | wire)


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
