"""From MODEL, deploy YAML, overrides and flags to what is served."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async import deploy, deploy_yaml, models
from omni_async.config import EdgeConfig, PipelineConfig, ServerConfig, StageConfig
from omni_async.errors import ConfigError

TWO_STAGES: dict[str, Any] = {
    "name": "two",
    "stages": [
        {"stage_id": 0, "name": "first", "kind": "echo", "engine_extras": {"a": 1, "b": 2}},
        {"stage_id": 1, "name": "second", "kind": "echo", "inputs": ["first"], "final_output": True},
    ],
}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "platform", lambda: "cpu")


def write(folder: Path, content: Any, name: str = "deploy.yaml") -> Path:
    """`content` as a YAML file; text as it is."""
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def load(folder: Path, content: Any, **options: Any) -> PipelineConfig:
    """The one pipeline that the YAML `content` describes."""
    (pipeline,) = deploy.load(deploy_config=write(folder, content), **options).pipelines
    return pipeline


def two(**top: Any) -> dict[str, Any]:
    """`TWO_STAGES` with further keys at the top."""
    return {**yaml.safe_load(yaml.safe_dump(TWO_STAGES)), **top}


def second(**fields: Any) -> dict[str, Any]:
    """`TWO_STAGES` with further keys in the second stage."""
    tree = two()
    tree["stages"][1].update(fields)
    return tree


def test_a_built_in_name_is_served_as_its_folder_says() -> None:
    (pipeline,) = deploy.load(model="echo").pipelines
    assert (pipeline.name, pipeline.model_arch, pipeline.echo) == ("echo", "echo", True)
    (stage,) = pipeline.stages
    assert (stage.kind, stage.model_arch, stage.model, stage.max_num_seqs) == ("echo", "echo", "", 256)


def test_every_model_folder_has_a_pipeline_that_resolves() -> None:
    for name in models.catalogue():
        assert deploy.load(model=name).pipelines[0].stages


def test_without_a_model_the_demo_pipelines_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    echo = models.catalogue()["echo"]
    folders = {"one": {**echo, "name": "one", "demo": True}, "two": {**echo, "name": "two"}}
    monkeypatch.setattr(models, "catalogue", lambda: folders)
    assert [pipeline.name for pipeline in deploy.load().pipelines] == ["one"]


def test_with_nothing_to_serve_the_names_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "demo_models", list)
    with pytest.raises(ConfigError, match=r"Name a MODEL.*echo"):
        deploy.load()


def test_a_whole_yaml_is_served_as_it_says(tmp_path: Path) -> None:
    pipeline = load(tmp_path, two(aliases=["tts-1"], client_window=4))
    assert (pipeline.name, pipeline.aliases, pipeline.client_window) == ("two", ("tts-1",), 4)
    assert [stage.name for stage in pipeline.stages] == ["first", "second"]
    assert pipeline.edges == (EdgeConfig(source="first", target="second"),)


def test_precedence_is_flag_then_override_then_platform_then_yaml_then_base(tmp_path: Path) -> None:
    base = two()
    base["stages"][1].update(max_num_seqs=1, max_batch_size=1, num_replicas=1, max_num_batched_tokens=1)
    base["stages"][1]["inline_limit"] = 1
    write(tmp_path, base, "base.yaml")
    top = {
        "base_config": "base.yaml",
        "stages": [
            {"stage_id": 1, "max_num_seqs": 2, "max_batch_size": 2, "num_replicas": 2, "inline_limit": 2}
        ],
        "platforms": {
            "cpu": {"stages": [{"stage_id": 1, "max_num_seqs": 3, "max_batch_size": 3, "num_replicas": 3}]}
        },
    }
    stage = load(
        tmp_path,
        top,
        stage_overrides={"1": {"max_num_seqs": 4, "max_batch_size": 4}},
        stage_flags={"1": {"max_num_seqs": 5}},
    ).stages[1]
    assert (stage.max_num_seqs, stage.max_batch_size, stage.num_replicas) == (5, 4, 3)
    assert (stage.inline_limit, stage.max_num_batched_tokens) == (2, 1)
    assert stage.scheduling_policy == StageConfig(stage_id=0, name="x", kind="x").scheduling_policy


def test_layers_merge_mappings_and_replace_the_rest(tmp_path: Path) -> None:
    write(tmp_path, two(aliases=["a", "b"]), "base.yaml")
    top = {
        "base_config": "base.yaml",
        "aliases": ["c"],
        "stages": [{"stage_id": 0, "engine_extras": {"b": 3}}],
    }
    pipeline = load(tmp_path, top, stage_flags={"0": {"engine_extras": {"c": 4}}})
    assert pipeline.aliases == ("c",)
    assert pipeline.stages[0].engine_extras == {"a": 1, "b": 3, "c": 4}


def test_a_layer_may_add_a_stage_and_set_an_edge(tmp_path: Path) -> None:
    write(tmp_path, two(edges=[{"from": 0, "to": 1, "window_size": 5, "max_inflight": 2}]), "base.yaml")
    third = {"stage_id": 2, "name": "third", "kind": "echo", "inputs": ["second"], "final_output": True}
    top = {
        "base_config": "base.yaml",
        "stages": [third],
        "edges": [{"source": "first", "target": "second", "window_size": 6}],
    }
    pipeline = load(tmp_path, top)
    assert [stage.name for stage in pipeline.stages] == ["first", "second", "third"]
    assert pipeline.edges[0] == EdgeConfig(source="first", target="second", window_size=6, max_inflight=2)


def test_base_config_is_a_path_beside_the_file_or_a_built_in_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, two(), "base.yaml")
    write(tmp_path / "sub", {"base_config": "../base.yaml", "name": "sub"})
    assert deploy.load(deploy_config=tmp_path / "sub" / "deploy.yaml").pipelines[0].name == "sub"
    pipeline = load(tmp_path, {"base_config": "echo", "stages": [{"stage_id": 0, "max_num_seqs": 7}]})
    assert (pipeline.name, pipeline.stages[0].max_num_seqs, pipeline.stages[0].model_arch) == (
        "echo",
        7,
        "echo",
    )


def test_a_circle_of_base_configs_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"base_config": "b.yaml"}, "a.yaml")
    write(tmp_path, {"base_config": "a.yaml"}, "b.yaml")
    with pytest.raises(ConfigError, match="leads back"):
        deploy.load(deploy_config=tmp_path / "a.yaml")


def test_a_deploy_config_is_laid_over_the_pipeline_of_model(tmp_path: Path) -> None:
    pipeline = load(tmp_path, {"stages": [{"stage_id": 0, "max_num_seqs": 9}]}, model="echo")
    assert (pipeline.name, pipeline.stages[0].max_num_seqs) == ("echo", 9)


def test_model_and_a_built_in_base_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave one out"):
        load(tmp_path, {"base_config": "echo"}, model="echo")


def test_only_the_section_of_this_platform_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {
        name: {"stages": [{"stage_id": 0, "devices": device}]}
        for name, device in (("cpu", "cpu"), ("cuda", "0,1"))
    }
    assert load(tmp_path, two(platforms=sections)).stages[0].devices == ("cpu",)
    monkeypatch.setattr(deploy, "platform", lambda: "cuda")
    assert load(tmp_path, two(platforms=sections)).stages[0].devices == ("cuda:0", "cuda:1")


def test_overrides_of_several_pipelines_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "demo_models", lambda: ["echo", "echo"])
    with pytest.raises(ConfigError, match="need one MODEL"):
        deploy.load(stage_flags={"0": {"max_num_seqs": 1}})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"2": {"max_num_seqs": 1}}, "There is no stage 2; the stages are 0, 1"),
        ({"0": {"max_num_seq": 1}}, "stage 0: max_num_seq: unknown key, did you mean max_num_seqs"),
        ({"0": {"stage_id": 3}}, "cannot be changed"),
        ({"0": {"max_num_seqs": 0}}, "stages[0].max_num_seqs: Expected `int` >= 1"),
    ],
)
def test_wrong_overrides_are_refused(tmp_path: Path, overrides: Any, said: str) -> None:
    for options in ({"stage_overrides": overrides}, {"stage_flags": overrides}):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, two(), **options)
        assert said in caught.value.message


def test_without_async_chunk_every_edge_passes_whole_outputs(tmp_path: Path) -> None:
    edges = [{"source": "first", "target": "second", "window_size": 4, "max_inflight": 3}]
    pipeline = load(tmp_path, two(async_chunk=False, edges=edges))
    assert pipeline.edges == (EdgeConfig(source="first", target="second", window_size=-1, max_inflight=3),)


def test_a_stage_without_inputs_has_those_that_edges_lead_to_it(tmp_path: Path) -> None:
    tree = two(edges=[{"from": 0, "to": "second", "window_size": 2}])
    del tree["stages"][1]["inputs"]
    pipeline = load(tmp_path, tree)
    assert pipeline.stages[1].inputs == ("first",)
    assert pipeline.edges == (EdgeConfig(source="first", target="second", window_size=2),)


def test_the_shared_memory_connector_sets_from_which_size_it_is_used(tmp_path: Path) -> None:
    connector = {"shm": {"name": "SharedMemoryConnector", "extra": {"shm_threshold_bytes": 4096}}}
    tree = second(inline_limit=1)
    pipeline = load(tmp_path, {**tree, "connectors": connector})
    assert [stage.inline_limit for stage in pipeline.stages] == [4096, 1]
    assert (
        load(tmp_path, two(connectors={"shm": {"name": "SharedMemoryConnector"}})).stages[0].inline_limit
        is None
    )


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("cpu", ("cpu",)),
        (0, ("cuda:0",)),
        ("0, 1", ("cuda:0", "cuda:1")),
        (["cuda:1", 2], ("cuda:1", "cuda:2")),
        ("cuda", ("cuda",)),
    ],
)
def test_devices_may_be_written_as_users_know_them(
    tmp_path: Path, written: Any, devices: tuple[str, ...]
) -> None:
    assert load(tmp_path, second(devices=written)).stages[1].devices == devices


def test_numbers_in_env_become_text(tmp_path: Path) -> None:
    assert load(tmp_path, second(env={"OMP_NUM_THREADS": 2, "A": "b"})).stages[1].env == {
        "OMP_NUM_THREADS": "2",
        "A": "b",
    }


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (two(async_chunks=True), "async_chunks: unknown key, did you mean async_chunk?"),
        (two(demo=True), "demo: unknown key"),
        (two(speech={"voice": "x"}), "speech.voice: unknown key, did you mean voices?"),
        (second(max_num_seq=1), "stages[1].max_num_seq: unknown key, did you mean max_num_seqs?"),
        (second(gpu_memory_utilization=0.5), "go into engine_extras"),
        (
            two(edges=[{"from": 0, "to": 1, "window": 2}]),
            "edges[0].window: unknown key, did you mean window_size?",
        ),
        (two(edges=[{"from": 0, "source": 0, "to": 1}]), "edges[0]: needs one source (or from)"),
        (two(edges=[{"from": 1}]), "edges[0]: needs one target (or to)"),
        (two(edges=[{"from": "x", "to": 1}]), "edge x → second joins nothing"),
        (two(edges=[{"from": 0, "to": 1, "window_size": -2}]), "edges[0].window_size: Expected `int` >= -1"),
        (two(platforms={"tpu": {}}), "platforms.tpu: unknown key"),
        (
            two(platforms={"cuda": {"stages": [{"stage_id": 0, "device": 0}]}}),
            "platforms.cuda.stages[0].device:",
        ),
        (two(platforms={"cuda": {"platforms": {}}}), "platforms.cuda.platforms: unknown key"),
        (two(connectors={"m": {"name": "MooncakeConnector"}}), "connectors.m.name: the only connector is"),
        (
            two(connectors={"m": {"name": "SharedMemoryConnector", "extra": {"x": 1}}}),
            "connectors.m.extra.x:",
        ),
        (two(connectors={}), "connectors: must map one label"),
        (two(stages={}), "stages: must be a list"),
        (two(stages=["first"]), "stages[0]: must be a mapping"),
        (two(stages=[{"name": "a"}]), "stages[0]: needs a stage_id"),
        (two(stages=[{"stage_id": 0}, {"stage_id": 0}]), "stages[1]: stage_id 0 stands twice"),
        (two(stages=[{"stage_id": 0, "name": "a"}]), "stages[0]: Object missing required field `kind`"),
        (two(edges=3), "edges: must be a list"),
        (second(kind="ecko"), "there is no kind 'ecko', did you mean echo?"),
        (second(devices="tpu"), "stages[1].devices: 'tpu' is no device"),
        (second(num_replicas="many"), "stages[1].num_replicas: Expected `int`, got `str`"),
        (second(scheduling_policy="lifo"), "stages[1].scheduling_policy: Invalid enum value 'lifo'"),
        (second(env={"A": [1]}), "stages[1].env[...]: Expected `str`"),
        ([1], "the deploy config: must be a mapping"),
        ("name: a\nname: b\n", "'name' stands twice"),
        ("name: [", "not YAML"),
        ("", "the deploy config: must be a mapping"),
    ],
)
def test_what_would_have_no_effect_is_refused_with_its_path(tmp_path: Path, tree: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, tree)
    assert said in caught.value.message


def test_the_file_at_fault_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, two(naem="x"), "base.yaml")
    with pytest.raises(ConfigError, match="did you mean name") as caught:
        load(tmp_path, {"base_config": "base.yaml"})
    assert caught.value.message.startswith(f"{path}: ")
    with pytest.raises(ConfigError, match="No such file"):
        deploy.load(deploy_config=tmp_path / "absent.yaml")


def test_two_pipelines_may_not_answer_to_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "demo_models", lambda: ["echo", "echo"])
    with pytest.raises(ConfigError, match="both answer to 'echo'"):
        deploy.load()


def test_limits_given_in_python_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"max_queue: Expected `int` >= 0"):
        deploy.load(model="echo", server=ServerConfig(max_queue=-1))
    assert deploy.load(model="echo", server=ServerConfig(max_queue=1)).server.max_queue == 1


FULL = two(
    aliases=["a"],
    speech={"voices": ["v"], "default_voice": "v", "extra_params": {"t": {"type": "float"}}},
    edges=[{"from": 0, "to": 1, "window_size": 3}],
    platforms={"cpu": {"stages": [{"stage_id": 1, "devices": "cpu", "env": {"A": 1}}]}},
    connectors={"shm": {"name": "SharedMemoryConnector", "extra": {"shm_threshold_bytes": 1}}},
)
JUNK = st.sampled_from(
    [None, True, -1, 0.5, "", "x", [], [1], ["x"], [[]], {}, {"x": 1}, {1: []}, {"name": {}}]
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside `node`."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found for key, value in items for found in ((*path, key), *places(value, (*path, key)))]


@settings(max_examples=200, deadline=None)
@given(place=st.sampled_from(places(FULL)), junk=JUNK)
def test_whatever_stands_anywhere_is_served_or_refused_but_never_crashes(
    tmp_path_factory: pytest.TempPathFactory, place: tuple[Any, ...], junk: Any
) -> None:
    tree: Any = yaml.safe_load(yaml.safe_dump(FULL))
    node = tree
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = junk
    path = write(tmp_path_factory.getbasetemp(), tree, "junk.yaml")
    with contextlib.suppress(ConfigError):
        deploy.load(deploy_config=path)


def test_laying_over_changes_neither_tree() -> None:
    base, top = two(), {"stages": [{"stage_id": 0, "engine_extras": {"b": 9}}]}
    deploy_yaml.lay_over(base, top)
    assert base == TWO_STAGES
    assert top == {"stages": [{"stage_id": 0, "engine_extras": {"b": 9}}]}
