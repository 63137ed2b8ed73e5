"""The parts of a Qwen3-Omni checkpoint that a stage loads alone, under the names that its weights have."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoePreTrainedModel,
    Qwen3OmniMoeTalkerForConditionalGeneration,
)

OTHERS = [r"^thinker\.", r"^talker\.", r"^code2wav\."]
"""Weights of a checkpoint that belong to another stage."""


class TalkerPart(Qwen3OmniMoePreTrainedModel):
    """The talker, and the thinker's table of token embeddings, which it speaks from."""

    _keys_to_ignore_on_load_unexpected = OTHERS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        text = config.thinker_config.text_config
        self.talker = Qwen3OmniMoeTalkerForConditionalGeneration._from_config(config.talker_config)
        self.thinker = nn.Module()
        self.thinker.model = nn.Module()
        self.thinker.model.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.post_init()


class Code2WavPart(Qwen3OmniMoePreTrainedModel):
    """The codec's decoder."""

    _keys_to_ignore_on_load_unexpected = OTHERS

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.code2wav = Qwen3OmniMoeCode2Wav._from_config(config.code2wav_config)
        self.post_init()


# The experts of a checkpoint are separate, those of the module one tensor: transformers fuses them for
# classes that it knows.
_fusing: Any = get_checkpoint_conversion_mapping("qwen3_omni_moe")
register_checkpoint_conversion_mapping(TalkerPart.__name__, _fusing, overwrite=True)
