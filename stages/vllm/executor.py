"""vLLM's engine as an executor: the worker's loop steps it, each request gets what the engine made for it.

The engine batches, pages its cache and schedules chunked prefill by itself; nothing of that is done again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig
from vllm import ModelRegistry
from vllm.v1.engine.llm_engine import LLMEngine

from omni_async.config import StageConfig
from omni_async.errors import EngineDead, InvalidRequest
from omni_async.stages import torchvision_operators
from omni_async.stages.executor import StageRequest, StepOutput, StepResult
from omni_async.stages.vllm.errors import CLIENT_ERRORS
from omni_async.stages.vllm.parsing import Parsers
from omni_async.stages.vllm.prompts import Prompt, render, token_ids
from omni_async.stages.vllm.sampling import sampling_params
from omni_async.stages.vllm.settings import read_settings
from omni_async.stages.vllm.state import VllmState

log = logging.getLogger(__name__)


class VllmExecutor:
    """One engine in this process (with tensor parallelism: and its children)."""

    def __init__(self, config: StageConfig) -> None:
        self.config = config
        self.args, self.settings = read_settings(config)
        self._by_engine_id: dict[str, VllmState] = {}
        self._by_number: dict[str, VllmState] = {}

    def load(self) -> None:
        """Load the model and answer once. Raises `ConfigError` or what vLLM raises."""
        if torchvision_operators.declared():
            _inspect_here(self.config.model)
        self.engine = LLMEngine.from_engine_args(self.args)
        self.renderer = self.engine.renderer
        self.longest = self.engine.model_config.max_model_len
        self.defaults = dict(self.engine.model_config.get_diff_sampling_param())
        self.defaults.pop("max_tokens", None)
        self.parsers = Parsers(
            self.settings.tool_call_parser,
            self.args.reasoning_parser,
            self.renderer.get_tokenizer(),
            self.engine.model_config,
        )
        if self.settings.hidden_states is not None:
            layer = None if self.settings.hidden_states == "last" else self.settings.hidden_states
            self.engine.collective_rpc("capture_hidden_states", args=(layer,))
        state = self.admit(
            StageRequest(request=-1, params={"prompt_token_ids": [0, 1, 2], "max_tokens": 2}, seed=0)
        )
        while state.engine_id:
            self.step([state])

    def admit(self, request: StageRequest) -> VllmState:
        """Render the prompt and hand it to the engine. Raises `InvalidRequest`."""
        task = request.params.get("task", "generate")
        if task == "detokenize":
            return self._answered(request, self._detokenize(request.params["tokens"]))
        prompt = render(self.renderer, request, self.settings)
        ids = token_ids(prompt)
        if task == "tokenize":
            return self._answered(request, self._tokenized(ids))
        return self._begin(request, prompt, ids)

    def _begin(self, request: StageRequest, prompt: Prompt, ids: list[int]) -> VllmState:
        state = VllmState(request, ids, _grids(prompt))
        state.wants_hidden = self._wants_hidden(request, state)
        state.hidden_limit = len(ids) if self.settings.hidden_states_of == "prompt" else self.longest
        state.parsing = self.parsers.parse(request.params, ids)
        length = len(ids) or len(prompt.get("prompt_embeds", ()))
        params = sampling_params(
            request,
            room=self.longest - length,
            defaults=self.defaults,
            reads_all=state.wants_hidden,
            parsing=state.parsing,
        )
        number = str(request.request)
        try:
            state.engine_id = self.engine.add_request(number, prompt, params)  # pyright: ignore[reportArgumentType]
        except CLIENT_ERRORS as error:
            raise InvalidRequest(str(error), param=getattr(error, "parameter", None)) from error
        self._by_engine_id[state.engine_id] = self._by_number[number] = state
        return state

    def _wants_hidden(self, request: StageRequest, state: VllmState) -> bool:
        if self.settings.hidden_states is None or not request.params.get("speaks"):
            return False
        return self.settings.hidden_states_of == "all" or bool(state.media)

    def _answered(self, request: StageRequest, meta: dict[str, Any]) -> VllmState:
        state = VllmState(request, [], {})
        state.answer = StepOutput(meta=meta, final=True)
        return state

    def _tokenized(self, ids: list[int]) -> dict[str, Any]:
        words = self.renderer.get_tokenizer().convert_ids_to_tokens(ids)
        return {"text": "", "token_ids": ids, "tokens": list(words), "max_model_len": self.longest}

    def _detokenize(self, ids: list[int]) -> dict[str, Any]:
        tokenizer = self.renderer.get_tokenizer()
        if ids and not 0 <= min(ids) <= max(ids) < len(tokenizer):
            raise InvalidRequest(f"tokens must be below {len(tokenizer)}.", param="tokens")
        return {"text": tokenizer.decode(ids)}

    def step(self, states: Sequence[VllmState]) -> list[StepResult]:
        """One step of the engine, for whatever it runs; `states` get what is there for them."""
        if self.engine.has_unfinished_requests():
            self._advance()
        return [state.take() for state in states]

    def _advance(self) -> None:
        try:
            outputs = self.engine.step()
            rows = self._rows()
        except Exception as error:
            # The engine cannot be trusted after this: the worker is replaced, and those who have got
            # nothing yet begin again.
            log.exception("the engine's step failed")
            raise EngineDead(f"vLLM's step failed: {type(error).__name__}: {error}") from error
        for engine_id, (first, hidden) in rows.items():
            _keep(self._by_engine_id[engine_id], first, hidden)
        for output in outputs:
            if (state := self._by_number.get(output.request_id)) is not None:
                self._receive(state, output)

    def _rows(self) -> dict[str, Any]:
        wanted = [name for name, state in self._by_engine_id.items() if state.wants_hidden]
        if not wanted:
            return {}
        (rows,) = self.engine.collective_rpc("pop_hidden_states", args=(wanted,))
        return rows

    def _receive(self, state: VllmState, output: Any) -> None:
        (completion,) = output.outputs
        made = state.made
        made.text += completion.text
        made.token_ids.extend(completion.token_ids)
        if completion.logprobs:
            count = state.request.params["logprobs"]
            pairs = zip(completion.logprobs, completion.token_ids, strict=True)
            made.logprobs.extend(_logprobs(found, token, count) for found, token in pairs)
        state.cached_tokens = output.num_cached_tokens or 0
        made.stop_reason = completion.stop_reason
        if output.finished:
            made.finish_reason = completion.finish_reason or "stop"
            self._forget(state)

    def _forget(self, state: VllmState) -> None:
        del self._by_engine_id[state.engine_id], self._by_number[str(state.request.request)]
        state.engine_id = ""

    def abort(self, state: VllmState) -> None:
        """Take the request out of the engine."""
        if state.engine_id:
            self.engine.abort_request([state.engine_id], internal=True)
            self._forget(state)

    def close(self) -> None:
        """Let the engine go."""
        self.engine.engine_core.shutdown()
        del self.engine


def _inspect_here(model: str) -> None:
    """Import the model's class in this process: vLLM would look at it in a child, which could not."""
    described, _ = PreTrainedConfig.get_config_dict(model)
    for name in described.get("architectures") or ():
        if lazy := ModelRegistry.models.get(name):
            ModelRegistry.register_model(name, lazy.load_model_cls())


def _keep(state: VllmState, first: int, rows: Any) -> None:
    """Add rows, less those that a preempted request computes again and those that nobody asked for."""
    fresh = rows[max(0, state.hidden_upto - first) : max(0, state.hidden_limit - first)]
    if len(fresh):
        state.made.hidden.append(fresh)
        state.hidden_upto = max(state.hidden_upto, first + len(rows))


def _logprobs(found: Any, token: int, count: int) -> dict[str, Any]:
    chosen = found[token]
    top = sorted(found.items(), key=lambda each: each[1].rank)[:count]
    return {
        "token": chosen.decoded_token or "",
        "logprob": chosen.logprob,
        "top": [(value.decoded_token or "", value.logprob) for _, value in top],
    }


def _grids(prompt: Prompt) -> dict[str, Any]:
    """What a talker must know of the prompt's media to give them positions."""
    items = prompt.get("mm_kwargs") or {}
    found: dict[str, list[Any]] = {}
    for modality in items:
        for item in items[modality]:
            data = {} if item is None else item.get_data()
            for name in ("image_grid_thw", "video_grid_thw", "audio_feature_lengths", "second_per_grid_ts"):
                if name in data:
                    found.setdefault(name, []).append(data[name].tolist())
    return found


def create(config: StageConfig) -> VllmExecutor:
    """The executor of a `vllm` stage. Raises `ConfigError`."""
    return VllmExecutor(config)
