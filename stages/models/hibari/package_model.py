"""The model file inside the `hibari-tts` package, and sessions over parts of it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from omni_async.errors import ConfigError
from omni_async.stages.models.hibari.onnx_reader import Graph, read_graph

onnxruntime: Any = importlib.import_module("onnxruntime")  # it has no types

SHA256 = "5f70741d4e900f4e85d0037498736cc1b3e1b9a63a13546a5da1e63abf4fccd8"


def model_path() -> Path:
    """The package's model file, found without importing the package. Raises `ConfigError`."""
    spec = importlib.util.find_spec("hibari")
    if spec is None or spec.origin is None:
        raise ConfigError("The built-in voice needs the package hibari-tts==0.2.1.")
    return Path(spec.origin).parent / "assets" / "hibari.onnx"


def load_graph(path: Path) -> Graph:
    """The file's graph, if it is the very file that this code was written for; else `ConfigError`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.") from None
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ConfigError(f"{path} is not the model of hibari-tts 0.2.1: its sha256 differs.")
    return read_graph(data)


def open_session(model: bytes, device: str) -> Any:
    """An `onnxruntime.InferenceSession` of one thread on `device`, "cpu" or "cuda[:n]".

    Raises `ConfigError` when the installed onnxruntime cannot use the device.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=_providers(device))


def _providers(device: str) -> list[Any]:
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return ["CPUExecutionProvider"]
    if kind != "cuda" or not (number or "0").isdigit():
        raise ConfigError(f"Unknown device {device!r}: cpu, cuda or cuda:N.")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise ConfigError(f"Device {device!r} needs the package onnxruntime-gpu in place of onnxruntime.")
    return [("CUDAExecutionProvider", {"device_id": int(number or 0)}), "CPUExecutionProvider"]
