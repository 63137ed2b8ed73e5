"""What a `vllm` stage's deploy keys mean: vLLM's own engine arguments, and the few that are ours."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from omni_async.config import StageConfig
from omni_async.errors import ConfigError

if TYPE_CHECKING:
    from vllm import EngineArgs

WORKER_EXTENSION = "omni_async.stages.vllm.hidden_states.HiddenStatesExtension"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that are not vLLM's.

    `hidden_states` is what a request that speaks sends on, per token: the output of the last layer (`last`),
    or the input of layer k (`k`, counted as transformers counts `hidden_states`). `hidden_states_of` is
    `all` positions, or those of the `prompt` where it has media. `chat_template` replaces the model's own.
    `times_films` tells the model's processor how many frames a second a request's films have.
    """

    hidden_states: int | Literal["last"] | None = None
    hidden_states_of: Literal["all", "prompt"] = "all"
    tool_call_parser: str = ""
    chat_template: str | None = None
    times_films: bool = False


def read_settings(config: StageConfig) -> tuple[EngineArgs, Settings]:
    """vLLM's arguments and ours. Raises `ConfigError` naming an unknown key and the nearest known one."""
    from vllm import EngineArgs

    known = [field.name for field in fields(EngineArgs)]
    ours = {key: value for key, value in config.engine_extras.items() if key in Settings.__struct_fields__}
    theirs = {key: value for key, value in config.engine_extras.items() if key not in ours}
    for key in theirs:
        if key in _FIXED:
            raise ConfigError(f"Stage {config.name}: {key} is set by {_FIXED[key]}.")
        if key not in known:
            near = get_close_matches(key, [*known, *Settings.__struct_fields__], 1)
            hint = f"did you mean {near[0]}?" if near else "it is no engine argument of vLLM."
            raise ConfigError(f"Stage {config.name}: engine_extras.{key}: unknown key, {hint}")
    if "mm_device_do_normalize" in known:
        # vLLM rounds resized pictures to 8 bits otherwise: models see others than transformers shows them.
        theirs.setdefault("mm_device_do_normalize", False)
    try:
        settings = msgspec.convert(ours, Settings)
        return EngineArgs(**_defaults(config, settings), **theirs), settings
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Stage {config.name}: {error}") from None


_FIXED = {
    "model": "the pipeline's model",
    "max_num_seqs": "the stage's max_num_seqs",
    "worker_extension_cls": "hidden_states",
    "disable_log_stats": "the server",
}


def _defaults(config: StageConfig, settings: Settings) -> dict[str, Any]:
    args: dict[str, Any] = {
        "model": config.model,
        "max_num_seqs": config.max_num_seqs,
        "disable_log_stats": True,
    }
    if config.max_num_batched_tokens:
        args["max_num_batched_tokens"] = config.max_num_batched_tokens
    if settings.hidden_states is not None:
        # Rows are read after each step: the next one must not have begun.
        args |= {"worker_extension_cls": WORKER_EXTENSION, "async_scheduling": False}
        # Media that vLLM's cache knows come without what a talker must know of them.
        args["mm_processor_cache_gb"] = 0
    return args
