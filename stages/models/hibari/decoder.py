"""hibari's second half as a stream: frames → five spectral maps, with the convolutions' state per sentence.

Each of the nine convolutions needs three frames on either side. Instead of computing such context
again for every chunk, each layer keeps its last six input frames: a chunk costs what it is long,
and what comes out equals decoding the sentence whole. Output lags input by 27 frames until the
sentence ends.

The weights are the package's int8 ones. The package quantizes what they are multiplied with by one scale
for all frames of a sentence, which a stream cannot know; here each layer has a scale once and for all.
That errs as little (28 dB below the sound, like the package), the products are sums of integers, exact and
the same in any chunk, and half of the work around them falls away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Scale:
    """Quantized values are 0…255: `value / step + zero`, rounded."""

    step: float
    zero: int


NORMED = Scale(1 / 14, 100)
"""For what a LayerNorm gives: nearly all of it is between -7 and 7, with room above."""

GELU_STEPS = (0.047, 0.028, 0.022, 0.022, 0.031, 0.036, 0.034, 0.052)
"""Per layer, for what its GELU gives: 1.25 times what 9999 of 10000 values stay below, over 250, measured
over 20 sentences of both talkers at several pitches and speeds."""

GELU_LOWEST = 0.17


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

    def encode(self) -> bytes:
        """The encoded model; its outputs are the five maps and the new tails."""
        x = self._columns(self._first())
        for number in range(LAYERS):
            x = self._block(x, number)
        rows = self._norm(self._rows(x), "m.dec_norm")
        maps = self._maps(rows)
        shapes: dict[str, Shape] = {name: (1, CHANNELS, name) for name in ("end", *self.tails)}
        return self.model({"windows": ("frames", WINDOW), **shapes}, [*maps, *self._new_tails])

    def _maps(self, rows: str) -> list[str]:
        whole = self._linear(rows, NORMED, "/head", "m.head.bias")
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
        hidden = self._linear(rows, NORMED, f"/dec.{number}/pw1")
        # GELU by tanh: what it errs is a fiftieth of a quantization step.
        hidden = self.node("FastGelu", hidden, self._tensor(f"{name}.pw1.bias"), domain=CONTRIB)
        step = GELU_STEPS[number]
        positive = Scale(step, math.ceil(GELU_LOWEST / step))
        mixed = self._linear(hidden, positive, f"/dec.{number}/pw2", f"{name}.pw2.bias", f"{name}.gamma")
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

    def _linear(
        self, x: str, scale: Scale, weight: str, bias: str | None = None, gain: str | None = None
    ) -> str:
        """`x` [n, in], quantized, times a quantized weight [in, out] and `gain` [out], plus `bias` times
        `gain`."""
        name = f"{weight}/Transpose_output_0"
        values = self._array(f"{name}_quantized")
        if self._array(f"{name}_zero_point") != 0:
            raise ValueError(f"{name} is not quantized around zero")
        gains = np.ones(values.shape[1], np.float32) if gain is None else self._array(gain)
        step, zero = self.constant(scale.step, np.float32), self.constant(scale.zero, np.uint8)
        inputs = [
            self.node("QuantizeLinear", x, step, zero),
            self.constant(values),
            step,
            self.constant(gains * self._array(f"{name}_scale"), np.float32),
            zero,
        ]
        if bias is not None:
            # An input left out has no name: the weight's zero point is 0.
            inputs += ["", self.constant(self._array(bias) * gains, np.float32)]
        return self.node("MatMulIntegerToFloat", *inputs, domain=CONTRIB)

    def _tensor(self, name: str) -> str:
        return self.constant(self._array(name))

    def _array(self, name: str) -> NDArray[Any]:
        return read_tensor(self._source.initializers[name])
