"""What transformers itself makes of a conversation with a Qwen-Omni checkpoint: tokens, codes and sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
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
        return self._spoken(inputs, ids, caught[0][0], waveform)

    def _spoken(self, inputs: Mapping[str, Any], ids: Any, codes: Any, waveform: Any) -> Spoken:
        prompt = inputs["input_ids"][0].tolist()
        answer = ids[0, len(prompt) :].tolist()
        text = self.processor.tokenizer.decode(answer, skip_special_tokens=True)
        return Spoken(prompt, answer, text, codes.numpy(), waveform.reshape(-1).numpy())


class Reference25(Reference):
    """Qwen2.5-Omni: its `codes` are `[1, codes]`, its sound begins with the noise of `seed`."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import Qwen2_5OmniForConditionalGeneration

        super().__init__(Qwen2_5OmniForConditionalGeneration, folder)
        talker = self.model.talker
        prepare = talker.prepare_inputs_for_generation

        # transformers 5.19 leaves out a mask that hides nothing, and with it the talker forgets the codes
        # that its prompt ends with, and the positions of media.
        @wraps(prepare)
        def prepare_with_mask(input_ids: Any, **kwargs: Any) -> Any:
            mask = torch.ones_like(input_ids)
            return {**prepare(input_ids, **kwargs), "attention_mask": mask}

        talker.prepare_inputs_for_generation = prepare_with_mask

    def speak(
        self,
        inputs: Mapping[str, Any],
        *,
        tokens: int,
        frames: int,
        seed: int = 0,
        speaker: str = "Chelsie",
    ) -> Spoken:
        """Its answer to what its processor made."""
        import torch

        caught: list[Any] = []
        decode = self.model.token2wav.forward

        def catch(code: Any, **kwargs: Any) -> Any:
            caught.append(code)
            torch.manual_seed(seed)
            return decode(code, **kwargs)

        self.model.token2wav.forward = catch
        config = self.model.config.talker_config
        # transformers 5.19 offers pictures to the talker too, which refuses them.
        inputs = {f"thinker_{key}" if "pixel" in key else key: each for key, each in inputs.items()}
        try:
            ids, waveform = self.model.generate(
                **inputs,
                speaker=speaker,
                thinker_max_new_tokens=tokens,
                thinker_eos_token_id=ID["im_end"],
                talker_do_sample=False,
                talker_max_new_tokens=frames,
                talker_eos_token_id=[config.tts_codec_pad_token_id, config.tts_codec_end_token_id],
            )
        finally:
            del self.model.token2wav.forward
        return self._spoken(inputs, ids, caught[0], waveform)

    def hidden(self, each: Spoken) -> NDArray[np.float32]:
        """The thinker's last hidden states float32 `[positions, width]` of a conversation without media."""
        import torch

        ids = torch.tensor([[*each.prompt, *each.answer[:-1]]])
        with torch.inference_mode():
            made = self.model.thinker(input_ids=ids, output_hidden_states=True)
        return made.hidden_states[-1][0].numpy()
