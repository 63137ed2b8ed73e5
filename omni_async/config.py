"""What is served, as frozen structs: the resolved form of a deploy YAML.

Only shapes and ranges live here. Reading YAML, overrides and defaults is `deploy.py`;
what the stages form together is `graph.py`. Limits of the server (queues, time-outs) are
`ServerConfig`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
SchedulingPolicy = Literal["due", "fcfs", "round_robin"]


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class EdgeConfig(_Config, frozen=True, kw_only=True):
    """One edge of the stage graph.

    `window_size` chunks of one request may be unconsumed on the edge (-1: the target starts when
    the source has finished). `max_inflight` requests may be open on the edge (0: no limit beyond
    the target's `max_num_seqs`).
    """

    source: str
    target: str
    window_size: Annotated[int, Meta(ge=-1)] = 8
    max_inflight: NonNegative = 0


class StageConfig(_Config, frozen=True, kw_only=True):
    """One stage: what runs, where, how often and how wide.

    `max_num_seqs` requests hold a slot of a replica; `max_batch_size` of them (0: all) and
    `max_num_batched_tokens` units of work (0: no limit) go into one step. `init_timeout` (seconds)
    and `inline_limit` (bytes) are the server's where None. `env` is laid over the worker's environment.
    `deterministic` rows never share a step with others, so that load cannot change a bit of an answer.
    """

    stage_id: NonNegative
    name: str
    kind: str
    model: str = ""
    model_arch: str = ""
    inputs: tuple[str, ...] = ()
    final_output: bool = False
    devices: tuple[str, ...] = ("cpu",)
    num_replicas: Positive = 1
    max_num_seqs: Positive = 16
    max_batch_size: NonNegative = 0
    max_num_batched_tokens: NonNegative = 0
    scheduling_policy: SchedulingPolicy = "due"
    init_timeout: Seconds | None = None
    inline_limit: NonNegative | None = None
    default_sampling_params: dict[str, Any] = {}
    engine_extras: dict[str, Any] = {}
    env: dict[str, str] = {}
    deterministic: bool = False


class SpeechConfig(_Config, frozen=True, kw_only=True):
    """What a speech pipeline can do, so that the API process can refuse the rest without torch.

    `fields` names the optional fields of `Speech` that the model honours (`speed`, `language`,
    `instructions`, …). `extra_params` maps each key of `extra_params` to its range
    `{"type": "float"|"int"|"bool"|"str", "ge": …, "le": …, "choices": […]}`.
    """

    voices: tuple[str, ...]
    default_voice: str
    voice_aliases: dict[str, str] = {}
    sample_rate: Positive = 24000
    channels: Positive = 1
    fields: tuple[str, ...] = ()
    extra_params: dict[str, dict[str, Any]] = {}


class ImageConfig(_Config, frozen=True, kw_only=True):
    """What a picture pipeline can do, so that the API process can refuse the rest without torch.

    Sizes are `WxH` in pixels: those of `sizes` where it names any, else every size whose sides are
    multiples of `multiple_of` from `min_side` to `max_side`. `upscaled_sizes` maps a size that is answered to
    the one that the model draws. `fields` names the optional fields of `Image` that the model honours.
    An answer takes at most `max_images` images (0: it draws from the prompt alone).
    """

    default_size: str = "1024x1024"
    multiple_of: Positive = 16
    min_side: Positive = 64
    max_side: Positive = 2048
    sizes: tuple[str, ...] = ()
    upscaled_sizes: dict[str, str] = {}
    fields: tuple[str, ...] = ()
    min_steps: Positive = 1
    max_images: NonNegative = 0
    needs_image: bool = False


class SoundConfig(_Config, frozen=True, kw_only=True):
    """What a pipeline that makes sound from a description can do: at most `max_seconds` of `channels`."""

    sample_rate: Positive
    channels: Positive = 2
    max_seconds: Seconds = 30.0
    fields: tuple[str, ...] = ()


class ChatConfig(_Config, frozen=True, kw_only=True):
    """What a conversation may hold and what comes back.

    `modalities` maps each that the pipeline answers with to the stage that makes it; `text` is always one.
    `inputs` are what messages may bring beside text: `image`, `audio`, `video`. The voices are of a
    pipeline that speaks.
    """

    modalities: dict[str, str]
    default_modalities: tuple[str, ...] = ("text",)
    inputs: tuple[str, ...] = ()
    voices: tuple[str, ...] = ()
    default_voice: str = ""
    voice_aliases: dict[str, str] = {}
    sample_rate: Positive = 24000


class PipelineConfig(_Config, frozen=True, kw_only=True):
    """One served model: a graph of stages and what it answers to."""

    name: str
    aliases: tuple[str, ...] = ()
    model_arch: str = ""
    stages: tuple[StageConfig, ...]
    edges: tuple[EdgeConfig, ...] = ()
    async_chunk: bool = True
    client_window: Positive = 16
    speech: SpeechConfig | None = None
    image: ImageConfig | None = None
    sound: SoundConfig | None = None
    chat: ChatConfig | None = None
    echo: bool = False


class ServerConfig(_Config, frozen=True, kw_only=True):
    """Limits and time-outs of one server; every field is a CLI flag of `serve`."""

    max_queue: NonNegative = 256
    request_timeout: Seconds = 600.0
    stage_init_timeout: Seconds = 120.0
    stage_hang_timeout: Seconds = 60.0
    drain_timeout: Seconds = 30.0
    restart_budget: NonNegative = 5
    target_first_audio: Seconds = 0.25
    inline_limit: NonNegative = 16 * 1024
    arena_bytes: NonNegative = 64 * 1024 * 1024
    single_process: bool = False
    deterministic: bool = False


class Deployment(_Config, frozen=True, kw_only=True):
    """All that one engine serves."""

    pipelines: tuple[PipelineConfig, ...]
    server: ServerConfig = ServerConfig()
