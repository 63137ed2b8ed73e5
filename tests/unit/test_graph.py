"""The stage graph: who feeds whom, and what cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from omni_async.config import EdgeConfig, PipelineConfig, StageConfig
from omni_async.errors import ConfigError
from omni_async.graph import StageGraph


def pipeline(*edges: EdgeConfig, **inputs: str) -> PipelineConfig:
    """Stages by name with their inputs, as text with spaces; the last one is final."""
    last = list(inputs)[-1]
    stages = [
        stage(number, name, inputs=tuple(sources.split()), final_output=name == last)
        for number, (name, sources) in enumerate(inputs.items())
    ]
    return PipelineConfig(name="p", stages=tuple(stages), edges=edges)


def stage(number: int, name: str, **fields: Any) -> StageConfig:
    """A stage of kind `echo`."""
    return StageConfig(stage_id=number, name=name, kind="echo", **fields)


def refusal(config: PipelineConfig) -> str:
    """What is said when the graph cannot be made."""
    with pytest.raises(ConfigError) as caught:
        StageGraph.from_pipeline(config)
    return caught.value.message


def test_a_chain_has_one_entry_and_one_end() -> None:
    graph = StageGraph.from_pipeline(pipeline(thinker="", talker="thinker", vocoder="talker"))
    assert list(graph.stages) == ["thinker", "talker", "vocoder"]
    assert (graph.entry, graph.final) == (("thinker",), ("vocoder",))
    assert graph.upstream == {"thinker": (), "talker": ("thinker",), "vocoder": ("talker",)}
    assert graph.downstream == {"thinker": ("talker",), "talker": ("vocoder",), "vocoder": ()}


def test_stages_may_fork_and_join() -> None:
    graph = StageGraph.from_pipeline(
        pipeline(text="", image="", left="text image", right="text", end="left right")
    )
    assert graph.entry == ("text", "image")
    assert graph.downstream["text"] == ("left", "right")
    assert graph.upstream["end"] == ("left", "right")


def test_an_answer_may_come_from_several_stages() -> None:
    stages = (
        stage(0, "thinker", final_output=True),
        stage(1, "talker", inputs=("thinker",), final_output=True),
    )
    assert StageGraph.from_pipeline(PipelineConfig(name="p", stages=stages)).final == ("thinker", "talker")


def test_edges_have_their_settings_and_the_defaults_where_none_are_given() -> None:
    edge = EdgeConfig(source="a", target="b", window_size=3, max_inflight=2)
    graph = StageGraph.from_pipeline(pipeline(edge, a="", b="a", c="b"))
    assert graph.edge("a", "b") is edge
    assert graph.edge("b", "c") == EdgeConfig(source="b", target="c")


def test_a_cycle_is_refused_and_named() -> None:
    said = refusal(pipeline(a="", b="a d", c="b", d="c"))
    assert "cycle" in said
    assert all(name in said for name in "bcd")


def test_a_stage_that_feeds_itself_is_refused() -> None:
    assert "cycle: a → a" in refusal(pipeline(a="a"))


def test_an_input_from_nowhere_is_refused_and_named() -> None:
    assert "stage b takes input from x; the stages are a, b" in refusal(pipeline(a="", b="x"))


def test_a_stage_whose_output_nobody_uses_is_refused_and_named() -> None:
    assert "output of stage side" in refusal(pipeline(a="", side="a", b="a"))


def test_a_pipeline_that_answers_nothing_is_refused() -> None:
    assert "final_output" in refusal(PipelineConfig(name="p", stages=(stage(0, "a"),)))
    assert "final_output" in refusal(PipelineConfig(name="p", stages=()))


def test_names_and_numbers_stand_once() -> None:
    final = {"final_output": True}
    same_name = (stage(0, "a", **final), stage(1, "a", **final))
    same_number = (stage(0, "a", **final), stage(0, "b", **final))
    assert "stage a stands twice" in refusal(PipelineConfig(name="p", stages=same_name))
    assert "stage_id 0 stands twice" in refusal(PipelineConfig(name="p", stages=same_number))
    assert "input of stage b a stands twice" in refusal(pipeline(a="", b="a a"))


def test_two_edges_between_the_same_stages_are_refused() -> None:
    edge = EdgeConfig(source="a", target="b")
    assert "edge a → b stands twice" in refusal(pipeline(edge, edge, a="", b="a"))


@pytest.mark.parametrize(("source", "target"), [("b", "a"), ("a", "c"), ("x", "b"), ("a", "x")])
def test_an_edge_that_joins_nothing_is_refused(source: str, target: str) -> None:
    said = refusal(pipeline(EdgeConfig(source=source, target=target), a="", b="a", c="b"))
    assert f"edge {source} → {target} joins nothing" in said


def test_an_edge_that_lets_nothing_pass_is_refused() -> None:
    edge = EdgeConfig(source="a", target="b", window_size=0)
    assert "window_size 0" in refusal(pipeline(edge, a="", b="a"))
