"""What a MODEL names: built in, a folder, or a Hugging Face id. Nothing here asks the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omni_async import deploy, models
from omni_async.config import ServerConfig
from omni_async.errors import ConfigError
from omni_async.models import Found


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """A catalogue of three model folders."""
    echo = models.catalogue()["echo"]
    found = {
        "echo": echo,
        "picture_maker": {**echo, "matches": ["StableDiffusion3Pipeline"]},
        "talker": {**echo, "matches": ["TalkerForCausalLM"]},
    }
    monkeypatch.setattr(models, "catalogue", lambda: found)
    return found


def checkpoint(folder: Path, name: str, **content: Any) -> str:
    """A model folder whose config says `content`."""
    (folder / name).write_text(json.dumps(content))
    return str(folder)


def test_a_built_in_name_needs_no_weights() -> None:
    assert models.find("echo") == Found("echo")


@pytest.mark.parametrize(
    ("name", "content", "folder"),
    [
        ("model_index.json", {"_class_name": "StableDiffusion3Pipeline"}, "picture_maker"),
        ("config.json", {"model_type": "picture-maker"}, "picture_maker"),
        ("config.json", {"model_type": "llama", "architectures": ["TalkerForCausalLM"]}, "talker"),
        ("config.json", {"model_type": "Talker", "architectures": None}, "talker"),
        ("config.json", {"model_type": "unheard_of"}, None),
        ("config.json", {}, None),
    ],
)
def test_a_local_folder_is_served_by_what_its_config_says(
    tmp_path: Path, name: str, content: dict[str, Any], folder: str | None
) -> None:
    model = checkpoint(tmp_path, name, **content)
    found = models.find(model)
    assert (found.folder, found.weights) == (folder, model)


def test_stages_load_the_checkpoint_unless_they_name_their_own(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "config.json", model_type="echo")
    (pipeline,) = deploy.load(model=model).pipelines
    assert (pipeline.stages[0].model, pipeline.model_arch) == (model, "echo")
    (pipeline,) = deploy.load(model=model, stage_flags={"0": {"model": "other"}}).pipelines
    assert pipeline.stages[0].model == "other"


def test_a_checkpoint_that_no_folder_serves_needs_a_whole_deploy_config(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "config.json", model_type="unheard_of")
    with pytest.raises(ConfigError, match=r"No folder under stages/models serves .* unheard_of"):
        deploy.load(model=model)
    path = tmp_path / "deploy.yaml"
    path.write_text("name: mine\nstages: [{stage_id: 0, name: s, kind: echo, final_output: true}]\n")
    (pipeline,) = deploy.load(model=model, deploy_config=path).pipelines
    assert (pipeline.name, pipeline.stages[0].model) == ("mine", model)


def test_a_pattern_serves_what_no_folder_names(tmp_path: Path, folders: dict[str, dict[str, Any]]) -> None:
    folders["any"] = {**folders["echo"], "matches": ["*Pipeline"]}
    for name, folder in (("StableDiffusion3Pipeline", "picture_maker"), ("NewPipeline", "any")):
        model = checkpoint(tmp_path, "model_index.json", _class_name=name)
        assert models.find(model).folder == folder


def test_weights_beside_a_pipeline_are_found_from_anywhere(folders: dict[str, dict[str, Any]]) -> None:
    stage = {**folders["echo"]["stages"][0], "model": "./weights"}
    folders["echo"] = {**folders["echo"], "stages": [stage]}
    (pipeline,) = deploy.load(model="echo").pipelines
    assert pipeline.stages[0].model == str(models.folder_of("echo") / "weights")


def test_deterministic_reaches_every_stage() -> None:
    for server, expected in ((ServerConfig(deterministic=True), True), (None, False)):
        (pipeline,) = deploy.load(model="echo", server=server).pipelines
        assert [stage.deterministic for stage in pipeline.stages] == [expected]


def test_two_folders_that_serve_one_class_are_refused(
    tmp_path: Path, folders: dict[str, dict[str, Any]]
) -> None:
    folders["echo"] = {**folders["echo"], "matches": ["TalkerForCausalLM"]}
    model = checkpoint(tmp_path, "config.json", architectures=["TalkerForCausalLM"])
    with pytest.raises(ConfigError, match="several folders: echo, talker"):
        models.find(model)


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        models.find(str(tmp_path))


@pytest.mark.parametrize("model", ["tlaker", "./talker", "a b/c", "/nowhere/talker", "a/b/c", ""])
def test_what_is_not_there_is_refused_without_asking_the_hub(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_config_from_hub", lambda _: pytest.fail("the hub was asked"))
    with pytest.raises(ConfigError, match="neither a built-in model, nor a folder or Hugging Face id"):
        models.find(model)


def test_a_near_name_is_offered() -> None:
    with pytest.raises(ConfigError, match="Did you mean talker"):
        models.find("tlaker")


def test_a_cached_hugging_face_model_is_found_without_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--talker" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "talker"}')
    (tmp_path / "models--org--talker" / "refs").mkdir()
    (tmp_path / "models--org--talker" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert models.find("org/talker") == Found("talker", "org/talker", ("talker",))
    with pytest.raises(
        ConfigError, match="org/absent is not on this machine, and the Hugging Face hub does not"
    ):
        models.find("org/absent")


def test_kinds_are_the_modules_of_a_models_folder_and_the_common_ones() -> None:
    assert "echo" in models.kinds("")
    assert set(models.kinds("")) <= set(models.kinds("echo"))
    assert all(name.isidentifier() for name in models.kinds("echo"))
