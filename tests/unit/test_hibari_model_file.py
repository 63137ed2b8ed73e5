"""Reading, cutting and writing of ONNX graphs, and what is refused at start-up."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from omni_async.config import StageConfig
from omni_async.errors import ConfigError
from omni_async.stages.models.hibari import code2wav, talker
from omni_async.stages.models.hibari.onnx_reader import read_graph, read_tensor
from omni_async.stages.models.hibari.onnx_writer import GraphBuilder, cut
from omni_async.stages.models.hibari.package_model import load_graph, model_path, open_session
from omni_async.stages.models.hibari.sampler import Sampler


def make_model() -> tuple[bytes, str, str]:
    """y = 2·x + [1, 2, 3] and z = y², and the names of y and z."""
    builder = GraphBuilder()
    doubled = builder.node("Mul", "x", builder.constant(2.0, np.float32))
    y = builder.node("Add", doubled, builder.constant(np.array([1, 2, 3], np.float32)))
    z = builder.node("Mul", y, y)
    return builder.model({"x": ("n", 3)}, [y, z]), y, z


def test_a_written_graph_runs() -> None:
    model, _, _ = make_model()
    y, z = open_session(model, "cpu").run(None, {"x": np.ones((2, 3), np.float32)})
    assert y.tolist() == [[3, 4, 5], [3, 4, 5]]
    assert z.tolist() == [[9, 16, 25], [9, 16, 25]]


def test_a_cut_keeps_only_what_its_outputs_need() -> None:
    model, y, _ = make_model()
    graph = read_graph(model)
    part = cut(graph, [y])
    assert len(read_graph(part).nodes) == 2
    (found,) = open_session(part, "cpu").run(None, {"x": np.zeros((1, 3), np.float32)})
    assert found.tolist() == [[1, 2, 3]]
    with pytest.raises(KeyError):
        cut(graph, ["nothing"])


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int8, np.int32, np.int64])
def test_constants_come_back_as_they_were(dtype: type[np.generic]) -> None:
    values = np.array([[0, 1, 100], [3, 5, 127]]).astype(dtype)
    builder = GraphBuilder()
    name = builder.constant(values)
    graph = read_graph(builder.model({"x": (1,)}, ["x"]))
    again = read_tensor(graph.initializers[name])
    assert again.dtype == dtype
    assert np.array_equal(again, values)


def test_the_packages_file_is_found_and_whole() -> None:
    graph = load_graph(model_path())
    assert {"ids", "speed"} == set(graph.inputs)
    assert read_tensor(graph.initializers["m.dec_norm.weight"]).shape == (256,)


def test_another_model_file_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "hibari.onnx"
    shutil.copy(model_path(), other)
    with other.open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"\x01\x02\x03")
    with pytest.raises(ConfigError, match="sha256"):
        load_graph(other)
    with pytest.raises(ConfigError, match="No such file"):
        load_graph(tmp_path / "none.onnx")


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "talker.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        Sampler(tmp_path / "talker.safetensors")


@pytest.mark.parametrize("device", ["cuda:0", "tpu", "cuda:x"])
@pytest.mark.parametrize("module", [talker, code2wav])
def test_a_device_that_is_not_there_is_refused_at_start(module: object, device: str) -> None:
    assert module in (talker, code2wav)
    create = talker.create if module is talker else code2wav.create
    executor = create(StageConfig(stage_id=0, name="s", kind="s", devices=(device,)))
    with pytest.raises(ConfigError, match=r"evice"):
        executor.load()


@pytest.mark.parametrize("create", [talker.create, code2wav.create])
def test_settings_without_effect_are_refused(create: object) -> None:
    assert callable(create)
    with pytest.raises(ConfigError, match="top_k"):
        create(StageConfig(stage_id=0, name="s", kind="s", engine_extras={"top_k": 5}))
