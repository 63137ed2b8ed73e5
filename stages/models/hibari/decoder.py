"""hibari's second half as a stream: frames → five spectral maps, with the convolutions' state per sentence.

Each of the nine convolutions needs three frames on either side. Instead of computing such context
again for every chunk, each layer keeps its last six input frames: a chunk costs what it is long,
and what comes out equals decoding the sentence whole. Output lags input by 27 frames until the
sentence ends.

The weights are the package's int8 ones. The package quantizes what they are multiplied with by one scale
for all frames of a sentence, which a stream cannot know; here every frame has its own scale. The products
are sums of integers: exact, and the same in any chunk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from omni_async.stages.models.hibari.frames import FRAME_CHANNELS
from omni_async.stages.models.hibari.onnx_reader import Graph, read_tensor
from omni_async.stages.models.hibari.onnx_writer import CONTRIB, GraphBuilder, Shape
from omni_async.stages.models.hibari.package_model import open_session
from omni_async.stages.models.hibari.spectra import BINS, Floats, Spectra

CHANNELS = 256
LAYERS = 8
REACH = 3
LOOKAHEAD = REACH * (LAYERS + 1)
WINDOW = FRAME_CHANNELS * (2 * REACH + 1)

LOUDEST = 7.0
"""Logarithm of the largest magnitude, as in the package's own synthesis."""

LEVELS = 127
"""Quantized values are 0…127: the AVX2 kernels add products in pairs in 16 bits, where 8 bits overflow."""
CENTRE = 64
GELU_CENTRE, GELU_LOWEST = 8, 0.17
"""GELU gives nothing below -0.17, so that nearly all levels are left for what is positive."""


class DecoderState:
    """What later outputs of a sentence still need: the last three to six frames [n, 130], and per layer
    the last three to six inputs [1, 256, n]. Zeros stand before a sentence's beginning."""

    def __init__(self) -> None:
        self.frames: Floats = np.zeros((REACH, FRAME_CHANNELS), np.float32)
        self.tails: list[Floats] = [np.zeros((1, CHANNELS, REACH), np.float32)] * LAYERS


class Decoder:
    """The network. Sentences are advanced one by one, so that none feels another."""

    def __init__(self, graph: Graph, device: str) -> None:
        builder = _DecoderGraph(graph)
        self._session = open_session(builder.encode(), device)
        self._names = ["windows", "end", *builder.tails]

    def advance(self, state: DecoderState, frames: Floats, *, last: bool) -> tuple[Spectra, DecoderState]:
        """Frames [n, 130] → spectra [m, 601] of the frames that are now certain, and the next state.

        m = n - 27 for a sentence's first frames (at least 28, unless they are the last too), n + 27 for
        its last ones, n between. `state` is not changed. Chunks of two frames or more give the same
        bits as the sentence in one piece.
        """
        end = REACH if last else 0
        whole = np.concatenate([state.frames, frames, np.zeros((end, FRAME_CHANNELS), np.float32)])
        windows = sliding_window_view(whole, 2 * REACH + 1, 0).reshape(-1, WINDOW)
        values = [windows, np.zeros((1, CHANNELS, end), np.float32), *state.tails]
        after = DecoderState()
        made = self._session.run(None, dict(zip(self._names, values, strict=True)))
        after.frames, after.tails = whole[-2 * REACH :], made[5:]
        return Spectra(*made[:5]), after


class _DecoderGraph(GraphBuilder):
    """The streaming decoder's graph, with weights out of the package's one."""

    def __init__(self, source: Graph) -> None:
        super().__init__()
        self._source = source
        self.tails = [f"tail{number}" for number in range(LAYERS)]
        self._new_tails: list[str] = []
        self._one = self.constant(1.0, np.float32)

    def encode(self) -> bytes:
        """The encoded model; its outputs are the five maps and the new tails."""
        x = self._columns(self._first())
        for number in range(LAYERS):
            x = self._block(x, number)
        rows = self._norm(self._rows(x), "m.dec_norm")
        maps = self._maps(*self._quantize(rows))
        shapes: dict[str, Shape] = {name: (1, CHANNELS, name) for name in ("end", *self.tails)}
        return self.model({"windows": ("frames", WINDOW), **shapes}, [*maps, *self._new_tails])

    def _maps(self, integers: str, step: str, centre: int) -> list[str]:
        whole = self._linear(integers, step, centre, "/head", "m.head.bias")
        sizes = self.constant(np.full(5, BINS, np.int64))
        harmonic, theta, noise, free, free_phase = self.nodes("Split", (whole, sizes), 5, axis=1)
        turned = self.node("Mul", self.node("Tanh", theta), self.constant(np.pi, np.float32))
        return [self._magnitude(harmonic), turned, self._magnitude(noise), self._magnitude(free), free_phase]

    def _magnitude(self, logarithm: str) -> str:
        return self.node("Exp", self.node("Min", logarithm, self.constant(LOUDEST, np.float32)))

    def _first(self) -> str:
        # A convolution as a product with windows: onnxruntime's own differs in its last bits with length.
        weight = self._array("m.dec_in.weight").reshape(CHANNELS, WINDOW).T
        product = self.node("MatMul", "windows", self.constant(weight))
        return self.node("Add", product, self._tensor("m.dec_in.bias"))

    def _block(self, x: str, number: int) -> str:
        """A ConvNeXt block: depthwise convolution, LayerNorm, two linears, scaled residual."""
        name = f"m.dec.{number}"
        whole = self._extended(x, number)
        convolved = self.node(
            "Conv",
            whole,
            self._tensor(f"{name}.dw.weight"),
            self._tensor(f"{name}.dw.bias"),
            group=CHANNELS,
        )
        rows = self._norm(self._rows(convolved), f"{name}.norm")
        hidden = self._linear(*self._quantize(rows), f"/dec.{number}/pw1", None)
        hidden = self.node("BiasGelu", hidden, self._tensor(f"{name}.pw1.bias"), domain=CONTRIB)
        mixed = self._linear(
            *self._quantize_gelu(hidden), f"/dec.{number}/pw2", f"{name}.pw2.bias", f"{name}.gamma"
        )
        return self.node("Add", self._slice(whole, REACH, -REACH), self._columns(mixed))

    def _extended(self, x: str, layer: int) -> str:
        """A layer's input with what was kept before it and, at a sentence's end, zeros behind it."""
        whole = self.node("Concat", self.tails[layer], x, "end", axis=2)
        self._new_tails.append(self._slice(whole, -2 * REACH, 2**31))
        return whole

    def _slice(self, x: str, start: int, end: int) -> str:
        bounds = [self.constant(np.array([value], np.int64)) for value in (start, end, 2)]
        return self.node("Slice", x, *bounds)

    def _rows(self, x: str) -> str:
        """[1, channels, n] → [n, channels]."""
        shape = self.constant(np.array([-1, CHANNELS], np.int64))
        return self.node("Reshape", self.node("Transpose", x, perm=(0, 2, 1)), shape)

    def _columns(self, x: str) -> str:
        """[n, channels] → [1, channels, n]."""
        shape = self.constant(np.array([1, -1, CHANNELS], np.int64))
        return self.node("Transpose", self.node("Reshape", x, shape), perm=(0, 2, 1))

    def _norm(self, x: str, name: str) -> str:
        weight, bias = self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias")
        return self.node("LayerNormalization", x, weight, bias, epsilon=1e-5)

    def _quantize(self, x: str) -> tuple[str, str, int]:
        """Rows, each as integers around `CENTRE` → the integers, the rows' scales, the centre."""
        peak = self.node("ReduceMax", self.node("Abs", x), axes=(1,), keepdims=1)
        return self._scaled(x, self._step(peak, LEVELS - CENTRE, 1e-6), CENTRE)

    def _quantize_gelu(self, x: str) -> tuple[str, str, int]:
        peak = self.node("ReduceMax", x, axes=(1,), keepdims=1)
        least = GELU_LOWEST / GELU_CENTRE
        return self._scaled(x, self._step(peak, LEVELS - GELU_CENTRE, least), GELU_CENTRE)

    def _step(self, peak: str, levels: int, least: float) -> str:
        step = self.node("Mul", peak, self.constant(1.0 / levels, np.float32))
        return self.node("Max", step, self.constant(least, np.float32))

    def _scaled(self, x: str, step: str, centre: int) -> tuple[str, str, int]:
        zero = self.constant(centre, np.uint8)
        integers = self.node("QuantizeLinear", self.node("Div", x, step), self._one, zero)
        return integers, step, centre

    def _linear(
        self, integers: str, step: str, centre: int, weight: str, bias: str | None, gain: str | None = None
    ) -> str:
        """The product with a quantized weight [in, out], times `gain` [out], plus `bias` times `gain`."""
        name = f"{weight}/Transpose_output_0"
        values = self._array(f"{name}_quantized")
        if self._array(f"{name}_zero_point") != 0:
            raise ValueError(f"{name} is not quantized around zero")
        gains = np.ones(values.shape[1], np.float32) if gain is None else self._array(gain)
        product = self.node(
            "MatMulIntegerToFloat",
            integers,
            self.constant(values),
            self._one,
            self.constant(gains * self._array(f"{name}_scale"), np.float32),
            self.constant(centre, np.uint8),
            domain=CONTRIB,
        )
        product = self.node("Mul", product, step)
        if bias is None:
            return product
        return self.node("Add", product, self.constant(self._array(bias) * gains, np.float32))

    def _tensor(self, name: str) -> str:
        return self.constant(self._array(name))

    def _array(self, name: str) -> NDArray[Any]:
        return read_tensor(self._source.initializers[name])
