"""The `vllm` kind beside transformers on the same weights: tokens, hidden states, company, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from omni_async.config import StageConfig
from omni_async.errors import ConfigError, EngineDead, InvalidRequest
from omni_async.stages.executor import StageRequest, StepOutput
from omni_async.stages.registry import create_executor
from tests.tiny.language import ENGINE, tiny_language_model

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
PROMPTS = [[3 + (7 * i + j) % 300 for j in range(5 + 9 * i)] for i in range(8)]
TOKENS = 12


@pytest.fixture(scope="module")
def executor() -> Iterator[Any]:
    extras = {**ENGINE, "hidden_states": "last", "enable_prompt_embeds": True}
    extras["tool_call_parser"] = "hermes"
    extras["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}
    config = StageConfig(
        stage_id=0,
        name="thinker",
        kind="vllm",
        model=str(tiny_language_model()),
        max_num_seqs=8,
        engine_extras=extras,
    )
    made = create_executor(config)
    made.load()
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_language_model(), dtype=torch.float32).eval()


def ask(number: int, seed: int = 0, tensors: Mapping[str, Any] | None = None, **params: Any) -> StageRequest:
    params = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, **params}
    return StageRequest(
        request=number, params=params, seed=seed, tensors=tensors or {}, own=frozenset({"max_tokens"})
    )


def finish(executor: Any, requests: Sequence[StageRequest], *, stagger: int = 0) -> list[list[StepOutput]]:
    """All outputs of each request; request k joins after k * stagger steps."""
    waiting, live = list(requests), []
    made: dict[int, list[StepOutput]] = {request.request: [] for request in requests}
    for step in range(1000):
        while waiting and step >= stagger * (len(requests) - len(waiting)):
            live.append(executor.admit(waiting.pop(0)))
        for state, outputs in zip(list(live), executor.step(live), strict=True):
            made[state.request.request].extend(outputs)
            if outputs and outputs[-1].final:
                live.remove(state)
        if not (waiting or live):
            return list(made.values())
    raise AssertionError("requests did not end")


def tokens_of(outputs: Sequence[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.meta["token_ids"]]


def text_of(outputs: Sequence[StepOutput]) -> str:
    return "".join(output.meta["text"] for output in outputs)


def from_reference(reference: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    made = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
    )
    return made[0, len(prompt) :].tolist()


def test_eight_staggered_requests_each_say_what_transformers_says(executor: Any, reference: Any) -> None:
    requests = [ask(i, prompt_token_ids=prompt) for i, prompt in enumerate(PROMPTS)]
    for prompt, outputs in zip(PROMPTS, finish(executor, requests, stagger=2), strict=True):
        assert tokens_of(outputs) == from_reference(reference, prompt)
        assert [output.meta["finish_reason"] for output in outputs] == [None] * (TOKENS - 1) + ["length"]
        assert outputs[-1].meta["prompt_tokens"] == len(prompt)
        assert outputs[-1].meta["completion_tokens"] == TOKENS


def test_hidden_states_of_every_position_are_transformers_own(executor: Any, reference: Any) -> None:
    requests = [ask(i, prompt_token_ids=prompt, speaks=i % 2 == 0) for i, prompt in enumerate(PROMPTS)]
    for request, outputs in zip(requests, finish(executor, requests, stagger=1), strict=True):
        rows = [output.tensors["hidden"] for output in outputs if "hidden" in output.tensors]
        if not request.params["speaks"]:
            assert not rows
            continue
        prompt = list(request.params["prompt_token_ids"])
        assert outputs[0].meta["prompt_token_ids"] == prompt
        forwarded = prompt + tokens_of(outputs)[:-1]
        with torch.no_grad():
            expected = reference.model(torch.tensor([forwarded])).last_hidden_state[0].numpy()
        assert [len(each) for each in rows] == [len(prompt)] + [1] * (TOKENS - 1)
        np.testing.assert_allclose(np.concatenate(rows), expected, atol=2e-5)
        assert np.abs(expected[1:] - expected[:-1]).max() > 0.1, (
            "neighbours must differ for this to mean much"
        )


def test_a_prompt_that_the_cache_knows_still_gives_all_its_hidden_states(executor: Any) -> None:
    prompt = [5 + i % 90 for i in range(300)]
    first, second = (
        finish(executor, [ask(number, prompt_token_ids=prompt, speaks=True)])[0] for number in (1, 2)
    )
    np.testing.assert_allclose(first[0].tensors["hidden"], second[0].tensors["hidden"], atol=1e-5)
    silent = finish(executor, [ask(3, prompt_token_ids=prompt)])[0]
    assert silent[-1].meta["cached_tokens"] > 0
    assert tokens_of(silent) == tokens_of(first)


def test_a_seed_gives_the_same_answer_alone_and_in_company(executor: Any) -> None:
    def sampled(number: int, seed: int) -> StageRequest:
        return ask(number, seed, prompt_token_ids=PROMPTS[number % 8], temperature=1.0, top_k=40, top_p=0.95)

    together = finish(executor, [sampled(i, seed=i) for i in range(8)], stagger=1)
    alone = [finish(executor, [sampled(i, seed=i)])[0] for i in range(8)]
    assert list(map(tokens_of, together)) == list(map(tokens_of, alone))
    assert tokens_of(finish(executor, [sampled(0, seed=99)])[0]) != tokens_of(alone[0])


def test_embeddings_of_a_prompt_stand_for_its_tokens(executor: Any, reference: Any) -> None:
    with torch.no_grad():
        embeds = reference.get_input_embeddings()(torch.tensor(PROMPTS[3])).numpy()
    (outputs,) = finish(executor, [ask(1, tensors={"prompt_embeds": embeds})])
    assert tokens_of(outputs) == from_reference(reference, PROMPTS[3])


def test_an_aborted_request_leaves_the_engine_and_its_neighbours_go_on(executor: Any) -> None:
    alone = tokens_of(finish(executor, [ask(1, prompt_token_ids=PROMPTS[1])])[0])
    kept = executor.admit(ask(1, prompt_token_ids=PROMPTS[1]))
    gone = executor.admit(ask(2, prompt_token_ids=PROMPTS[2]))
    outputs = [executor.step([kept, gone])[0] for _ in range(3)]
    executor.abort(gone)
    assert executor.engine.get_num_unfinished_requests() == 1
    while kept.engine_id:
        outputs.append(executor.step([kept])[0])
    assert [token for each in outputs for token in tokens_of(each)] == alone
    assert not executor.engine.has_unfinished_requests()


def test_what_is_made_while_a_reader_is_slow_comes_as_one_chunk(executor: Any) -> None:
    slow = executor.admit(ask(1, prompt_token_ids=PROMPTS[1], speaks=True))
    fast = executor.admit(ask(2, prompt_token_ids=PROMPTS[2]))
    while fast.engine_id:
        executor.step([fast])
    ((output,),) = executor.step([slow])
    assert len(output.meta["token_ids"]) == TOKENS and output.final
    assert len(output.tensors["hidden"]) == len(PROMPTS[1]) + TOKENS - 1


def test_stop_words_bias_and_structure_are_obeyed(executor: Any) -> None:
    choice = {"structured_outputs": {"choice": ["hello", "quick"]}, "ignore_eos": False}
    schema = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
    asked = {"structured_outputs": {"json": schema}, "ignore_eos": False, "max_tokens": 60}
    biased = {"logit_bias": {"70": 100.0}, "max_tokens": 3}
    requests = [
        ask(1, prompt="the", **choice),
        ask(2, prompt="the", **asked),
        ask(3, prompt="the", **biased),
        ask(4, prompt="the", **biased, stop_token_ids=[70]),
        ask(5, prompt="the", allowed_token_ids=[80, 81], min_tokens=2),
    ]
    chosen, structured, bias, stopped, allowed = finish(executor, requests)
    assert text_of(chosen) in ("hello", "quick") and chosen[-1].meta["finish_reason"] == "stop"
    assert json.loads(text_of(structured)) == {"a": "b"}
    assert tokens_of(bias) == [70, 70, 70]
    assert tokens_of(stopped) == [70] and stopped[-1].meta["finish_reason"] == "stop"
    assert set(tokens_of(allowed)) <= {80, 81}


def test_log_probabilities_are_those_of_transformers(executor: Any, reference: Any) -> None:
    (outputs,) = finish(executor, [ask(1, prompt_token_ids=PROMPTS[2], logprobs=3)])
    ids = torch.tensor([PROMPTS[2] + tokens_of(outputs)])
    with torch.no_grad():
        logits = reference(ids).logits[0, len(PROMPTS[2]) - 1 : -1].log_softmax(-1)
    found = [each for output in outputs for each in output.meta["logprobs"]]
    expected = logits.topk(3).values.numpy()
    np.testing.assert_allclose([[value for _, value in each["top"]] for each in found], expected, atol=1e-4)
    np.testing.assert_allclose([each["logprob"] for each in found], expected[:, 0], atol=1e-4)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"prompt": "the", "max_tokens": 600}, "max_tokens"),
        ({"prompt": "the " * 5000}, None),
        ({"prompt_token_ids": [1, 999_999]}, None),
        ({"prompt": "x", "structured_outputs": {"regex": "((("}}, None),
        ({"prompt": "x", "structured_outputs": {"json": {"type": "nonsense"}}}, None),
        ({"prompt": "x", "temperature": -1.0}, "temperature"),
        ({"prompt": "x", "logit_bias": {"999999": 1.0}}, None),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "omni:image0"}}]}
                ]
            },
            None,
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"task": "detokenize", "tokens": [999_999]}, "tokens"),
    ],
)
def test_a_wrong_request_is_refused_when_it_comes(
    executor: Any, params: dict[str, Any], param: str | None
) -> None:
    neighbour = executor.admit(ask(1, prompt_token_ids=PROMPTS[1]))
    with pytest.raises(InvalidRequest) as caught:
        executor.admit(ask(2, **params))
    assert param is None or caught.value.param == param
    while neighbour.engine_id:
        executor.step([neighbour])
    assert not executor.engine.has_unfinished_requests()


def test_a_parameter_for_this_stage_that_it_does_not_know_is_refused(executor: Any) -> None:
    request = StageRequest(
        request=1, params={"prompt": "x", "temprature": 1}, seed=0, own=frozenset({"temprature"})
    )
    with pytest.raises(InvalidRequest, match="Did you mean temperature") as caught:
        executor.admit(request)
    assert caught.value.param == "sampling_params_list"


WHERE = {
    "type": "object",
    "properties": {"at": {"enum": [3]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": WHERE, "strict": True}}]


def test_a_forced_tool_call_is_read_out_of_the_text(executor: Any) -> None:
    messages = [{"role": "user", "content": "look"}]
    asked = {"messages": messages, "tools": TOOLS, "max_tokens": 80, "ignore_eos": False}
    asked["parallel_tool_calls"] = False
    # A random model would go on with white space, which the form allows.
    spaces = executor.renderer.get_tokenizer()("\n \t\r")["input_ids"]
    asked["logit_bias"] = {str(token): -100.0 for token in spaces}
    named = {"type": "function", "function": {"name": "look"}}
    for choice in ("required", named):
        (outputs,) = finish(executor, [ask(1, tool_choice=choice, **asked)])
        calls = [call for output in outputs for call in output.meta.get("tool_calls", ())]
        assert [call["name"] for call in calls if call["name"]] == ["look"]
        assert json.loads("".join(call["arguments"] or "" for call in calls)) == {"at": 3}
        assert outputs[-1].meta["finish_reason"] == "tool_calls"
        assert text_of(outputs) == ""


@pytest.mark.parametrize(
    ("said", "calls", "text"),
    [
        ('<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>', [("look", {"at": 3})], ""),
        ("nothing to do", [], "nothing to do"),
    ],
)
def test_tool_calls_and_text_are_told_apart(
    executor: Any, said: str, calls: list[tuple[str, Any]], text: str
) -> None:
    parsing = executor.parsers.parse({"messages": [], "tools": TOOLS}, [1, 2])
    ids = executor.renderer.get_tokenizer()(said)["input_ids"]
    pieces = [executor.renderer.get_tokenizer().decode([i]) for i in ids]
    reasons = [None] * (len(ids) - 1) + ["stop"]
    read = [
        parsing.read(piece, [i], finish_reason=reason)
        for piece, i, reason in zip(pieces, ids, reasons, strict=True)
    ]
    deltas = [call for each in read for call in each.get("tool_calls", ())]
    assert [name for call in deltas if (name := call["name"])] == [name for name, _ in calls]
    if calls:
        assert json.loads("".join(call["arguments"] or "" for call in deltas)) == calls[0][1]
    assert "".join(each["text"] for each in read) == text
    assert read[-1]["finish_reason"] == ("tool_calls" if calls else "stop")


def test_text_becomes_tokens_and_tokens_text(executor: Any) -> None:
    ((made,),) = finish(executor, [ask(1, task="tokenize", prompt="the quick fox")])
    ids = made.meta["token_ids"]
    assert len(made.meta["tokens"]) == len(ids) and made.meta["max_model_len"] == ENGINE["max_model_len"]
    ((text,),) = finish(executor, [ask(1, task="detokenize", tokens=ids)])
    assert text.meta["text"] == "the quick fox"


def test_a_failed_step_is_the_end_of_the_engine(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = executor.admit(ask(1, prompt_token_ids=PROMPTS[0]))

    def fail() -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(executor.engine, "step", fail)
        with pytest.raises(EngineDead, match="out of memory"):
            executor.step([state])
    executor.abort(state)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"max_modellen": 5}, "did you mean max_model_len"),
        ({"worker_extension_cls": "x"}, "worker_extension_cls"),
        ({"hidden_states": "first"}, "hidden_states"),
        ({"zzz": 1}, "no engine argument"),
    ],
)
def test_an_engine_key_that_vllm_does_not_have_is_refused(extras: dict[str, Any], message: str) -> None:
    config = StageConfig(stage_id=0, name="t", kind="vllm", model="m", engine_extras=extras)
    with pytest.raises(ConfigError, match=message):
        create_executor(config)


@pytest.mark.parametrize(("extras", "rounded"), [({}, False), ({"mm_device_do_normalize": True}, True)])
def test_pictures_are_rounded_only_when_it_is_asked_for(extras: dict[str, Any], rounded: bool) -> None:
    model = str(tiny_language_model())
    made: Any = create_executor(
        StageConfig(stage_id=0, name="t", kind="vllm", model=model, engine_extras=extras)
    )
    assert made.args.mm_device_do_normalize is rounded
