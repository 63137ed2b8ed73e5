"""The parts of a Qwen2.5-Omni checkpoint that a stage loads alone, under the names that its weights have."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniPreTrainedModel,
    Qwen2_5OmniTalkerForConditionalGeneration,
    Qwen2_5OmniToken2WavModel,
)
from transformers.utils.hub import cached_file

from omni_async.config import StageConfig
from omni_async.errors import ConfigError

OTHERS = [r"^thinker\.", r"^talker\.", r"^token2wav\."]
"""Weights of a checkpoint that belong to another stage."""

VOICES = "spk_dict.pt"


class TalkerPart(Qwen2_5OmniPreTrainedModel):
    """The talker, and the thinker's table of token embeddings, which it speaks from."""

    _keys_to_ignore_on_load_unexpected = OTHERS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        text = config.thinker_config.text_config
        self.talker = Qwen2_5OmniTalkerForConditionalGeneration._from_config(config.talker_config)
        self.thinker = nn.Module()
        self.thinker.model = nn.Module()
        self.thinker.model.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.post_init()


class Token2WavPart(Qwen2_5OmniPreTrainedModel):
    """The codec's decoder: a diffusion transformer and a vocoder."""

    _keys_to_ignore_on_load_unexpected = OTHERS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.token2wav = Qwen2_5OmniToken2WavModel._from_config(config.token2wav_config)
        self.post_init()


class Voice(NamedTuple):
    """`bos` is the token before what the voice says; `speaker` float32 `[1, width]`; `mel` is a recording of
    it, float32 `[1, frames, mels]`."""

    bos: int
    speaker: Tensor
    mel: Tensor


def load_voices(config: StageConfig) -> dict[str, Voice]:
    """The checkpoint's voices by their names in lower case. Raises `ConfigError`."""
    try:
        path = cached_file(config.model, VOICES)
        # Tensors and numbers: nothing else is unpickled.
        found = torch.load(str(path), weights_only=True, map_location="cpu")
        return {
            name.lower(): Voice(int(each["bos_token"]), each["cond"].float(), each["ref_mel"].float())
            for name, each in found.items()
        }
    except Exception as error:
        raise ConfigError(f"Stage {config.name}: {config.model} has no voices ({VOICES}): {error}") from error
