"""What transformers itself makes of a conversation with a Qwen-Omni checkpoint: tokens, codes and sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.tiny.omni import ID


class Spoken(NamedTuple):
    """`prompt` and `answer` are token ids, `text` is the answer's; `codes` int `[groups, frames]`; `waveform`
    float32 `[samples]`."""

    prompt: list[int]
    answer: list[int]
    text: str
    codes: Any
    waveform: NDArray[np.float32]


class Reference:
    """A checkpoint in transformers, greedy throughout."""

    def __init__(self, kind: Any, folder: Path) -> None:
        import torch
        from transformers import AutoProcessor

        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        # transformers 5.19 looks here for the rate of audio tokens, where no checkpoint has it.
        config = self.model.config
        self.model.talker.config.audio_config = config.thinker_config.audio_config
        self.processor: Any = AutoProcessor.from_pretrained(folder)

    def answer(
        self, messages: Sequence[Mapping[str, Any]], *, tokens: int, frames: int, **media: Any
    ) -> Spoken:
        """Its answer to `messages`, whose media are in `images`, `audio` and `videos`, in their order;
        `videos_kwargs` are for its processor."""
        text = self.processor.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        inputs = self.processor(text=[text], return_tensors="pt", **media)
        return self.speak(dict(inputs), tokens=tokens, frames=frames)

    def speak(self, inputs: Mapping[str, Any], *, tokens: int, frames: int) -> Spoken:
        """Its answer to what its processor made."""
        caught: list[Any] = []
        decode = self.model.code2wav.chunked_decode

        def catch(codes: Any, **kwargs: Any) -> Any:
            caught.append(codes)
            return decode(codes, **kwargs)

        self.model.code2wav.chunked_decode = catch
        try:
            ids, waveform = self.model.generate(
                **inputs,
                thinker_max_new_tokens=tokens,
                thinker_eos_token_id=ID["im_end"],
                talker_do_sample=False,
                talker_max_new_tokens=frames + 1,
            )
        finally:
            del self.model.code2wav.chunked_decode
        prompt = inputs["input_ids"][0].tolist()
        answer = ids[0, len(prompt) :].tolist()
        text = self.processor.tokenizer.decode(answer, skip_special_tokens=True)
        return Spoken(prompt, answer, text, caught[0][0].numpy(), waveform.reshape(-1).numpy())
