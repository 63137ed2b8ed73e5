"""Loading hibari's networks from the ONNX file inside the `hibari-tts` package.

The file's linear weights are int8 with one scale and zero point each; they are unpacked to float32,
which is what onnxruntime computes with too.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from omni_async.errors import ConfigError
from omni_async.stages.models.hibari.decoder import Decoder
from omni_async.stages.models.hibari.layers import Attention, ConvNext, TextEncoder
from omni_async.stages.models.hibari.onnx_reader import read_initializers
from omni_async.stages.models.hibari.prosody import Prosody

SHA256 = "5f70741d4e900f4e85d0037498736cc1b3e1b9a63a13546a5da1e63abf4fccd8"


def model_path() -> Path:
    """The package's model file, found without importing the package. Raises `ConfigError`."""
    spec = importlib.util.find_spec("hibari")
    if spec is None or spec.origin is None:
        raise ConfigError("The built-in voice needs the package hibari-tts==0.2.1.")
    return Path(spec.origin).parent / "assets" / "hibari.onnx"


def read_checked(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of the model file, if it is the very file these networks were written for."""
    if hashlib.sha256(path.read_bytes()).hexdigest() != SHA256:
        raise ConfigError(f"{path} is not the model of hibari-tts 0.2.1 (its sha256 differs).")
    return read_initializers(path)


def load_prosody() -> Prosody:
    """The talker's networks, in evaluation mode."""
    net = Prosody()
    loader = _Loader(read_checked(model_path()))
    loader.encoder(net.ctext, "m.text", "", "/Transpose_2_output_0", "")
    loader.encoder(net.text, "pn.text", "_1", "/Transpose_25_output_0", "_4")
    for module, name in (
        (net.dur0, "pn.dur.0"),
        (net.dur2, "pn.dur.2"),
        (net.pro_in, "pn.pro_in"),
        (net.pro_out, "pn.pro_out"),
    ):
        loader.plain(module, name)
    for i, block in enumerate(net.pro):
        loader.convnext(block, f"pn.pro.{i}", f"pro.{i}", "")
    return net.eval()


def load_decoder() -> Decoder:
    """The decoder's network, in evaluation mode."""
    net = Decoder()
    loader = _Loader(read_checked(model_path()))
    loader.plain(net.dec_in, "m.dec_in")
    loader.plain(net.dec_norm, "m.dec_norm")
    loader.linear(net.head, "/head/Transpose_output_0", "m.head.bias")
    for i, block in enumerate(net.dec):
        loader.convnext(block, f"m.dec.{i}", f"dec.{i}", "")
    return net.eval()


class _Loader:
    """Fills modules from tensors by the names that the exporter gave them."""

    def __init__(self, tensors: dict[str, NDArray[Any]]) -> None:
        self.tensors = tensors

    def plain(self, module: Any, name: str) -> None:
        """`weight` and `bias` as they stand."""
        module.weight.data = self._float(f"{name}.weight")
        module.bias.data = self._float(f"{name}.bias")

    def linear(self, module: nn.Linear, weight: str, bias: str) -> None:
        """A quantized weight [in, out] and a plain bias."""
        quantized = self.tensors[f"{weight}_quantized"].astype(np.float32)
        zero = self.tensors[f"{weight}_zero_point"].astype(np.float32)
        values = (quantized - zero) * self.tensors[f"{weight}_scale"]
        module.weight.data = torch.from_numpy(values).t().contiguous()
        module.bias.data = self._float(bias)

    def convnext(self, module: nn.Module, name: str, graph: str, suffix: str) -> None:
        """One ConvNeXt block; `graph` is its name in the graph, where the quantizer found its weights."""
        assert isinstance(module, ConvNext)
        self.plain(module.dw, f"{name}.dw")
        self.plain(module.norm, f"{name}.norm")
        self.linear(module.pw1, f"/{graph}/pw1{suffix}/Transpose_output_0", f"{name}.pw1.bias")
        self.linear(module.pw2, f"/{graph}/pw2{suffix}/Transpose_output_0", f"{name}.pw2.bias")
        module.gamma.data = self._float(f"{name}.gamma")

    def encoder(self, module: TextEncoder, name: str, suffix: str, qkv: str, number: str) -> None:
        """One text encoder."""
        module.emb.weight.data = self._float(f"{name}.emb.weight")
        for i, conv in enumerate(module.convs):
            self.convnext(conv, f"{name}.convs.{i}", f"convs.{i}", suffix)
        self._attention(module.attn, f"{name}.attn", qkv, number)
        self.plain(module.norm, f"{name}.norm")

    def _attention(self, module: Attention, name: str, qkv: str, number: str) -> None:
        self.plain(module.norm1, f"{name}.norm1")
        self.plain(module.norm2, f"{name}.norm2")
        self.linear(module.qkv, qkv, f"{name}.self_attn.in_proj_bias")
        out = f"/out_proj{number}/Transpose_output_0"
        self.linear(module.out, out, f"{name}.self_attn.out_proj.bias")
        self.linear(module.l1, f"/linear1{number}/Transpose_output_0", f"{name}.linear1.bias")
        self.linear(module.l2, f"/linear2{number}/Transpose_output_0", f"{name}.linear2.bias")

    def _float(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.tensors[name].astype(np.float32))
