"""Qwen2.5-Omni's talker: the thinker's text and hidden states, token by token, to codes.

Its input is that of `Qwen2_5OmniForConditionalGeneration.generate`: the whole conversation as the thinker
saw it, the voice's token, then a row of the answer a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from omni_async.config import StageConfig
from omni_async.errors import ConfigError, StageFailed
from omni_async.stages.ar.cache import RaggedCache, View
from omni_async.stages.ar.executor import ArExecutor
from omni_async.stages.ar.loading import Dtype, load_model, read_settings, torch_dtype
from omni_async.stages.ar.model import Prompt
from omni_async.stages.ar.sampling import Sampling
from omni_async.stages.ar.talker import TalkerState, check_voice, media_places
from omni_async.stages.executor import Chunk, Executor, StageRequest, StepOutput
from omni_async.stages.models.qwen2_5_omni.parts import TalkerPart, load_voices
from omni_async.stages.models.qwen2_5_omni.rates import codes_per_second


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`slices` are the codes in each chunk that leaves; the last number stands for all that follow."""

    dtype: Dtype = "auto"
    slices: tuple[int, ...] = (12,)


class Qwen25Talker:
    """The talker as an `ArModel`."""

    def __init__(self, config: StageConfig) -> None:
        self._stage = config
        self._settings = read_settings(config, Settings)

    def load(self, slots: int) -> RaggedCache:
        """Load the talker and the thinker's embeddings. Raises `ConfigError`."""
        device = self._stage.devices[0]
        dtype = torch_dtype(self._settings.dtype, device)
        part: Any = load_model(TalkerPart, self._stage, dtype)
        self.voices = load_voices(self._stage)
        self.talker = part.talker
        self.config = part.config.talker_config
        if set(self.config.layer_types) != {"full_attention"}:
            raise ConfigError(f"Stage {self._stage.name}: talkers with sliding attention are not built.")
        self._thinker_embed = part.thinker.model.embed_tokens
        self._rate = codes_per_second(part.config)
        decodable = part.config.token2wav_config.dit_config.num_embeds
        self._ends = {self.config.tts_codec_pad_token_id, self.config.tts_codec_end_token_id}
        self._never = torch.arange(self.config.vocab_size, device=device) > decodable
        self._never[list(self._ends)] = False
        self._never[self.config.tts_codec_start_token_id] = True
        media = part.config.thinker_config
        self._media_ids = self._ids([media.audio_token_id, media.image_token_id, media.video_token_id])
        with torch.inference_mode():
            text = [self.config.tts_text_end_token_id, self.config.tts_text_pad_token_id]
            self._eos, self._pad = self._thinker_embed(self._ids(text))
            codes = [self.config.tts_codec_pad_token_id, self.config.tts_codec_start_token_id]
            self._begin = self.talker.get_input_embeddings()(self._ids(codes))
        return RaggedCache(
            self.config.num_hidden_layers,
            slots,
            self.config.num_key_value_heads,
            self.config.head_dim,
            dtype=dtype,
            device=device,
        )

    def admit(self, request: StageRequest, sampling: Sampling) -> TalkerState:
        """Raises `InvalidRequest` for a voice that the checkpoint has not."""
        check_voice(self.voices, request.params["voice"])
        # What the reference implementation's repetition penalty sees before the first code.
        before = (
            self.config.tts_codec_mask_token_id,
            self.config.tts_codec_pad_token_id,
            self.config.tts_codec_start_token_id,
        )
        return TalkerState(request, sampling, self._settings.slices, before=before)

    def read(self, state: TalkerState) -> None:
        """Take the thinker's chunks in, and the rows that follow the prompt."""
        if state.inputs:
            state.thought.read(state)
        thought = state.thought
        if thought.ended and thought.seen < len(thought.prompt_ids) + len(thought.answer_ids):
            raise StageFailed("The thinker sent too few hidden states.")
        if state.begun:
            self._follow(state)
        elif thought.ended and not thought.answer_ids:
            state.done = True

    def _follow(self, state: TalkerState) -> None:
        """Queue what has come since: the rows of the answer after its first, and its end."""
        if state.text_ended:
            return
        rows = self._answer(state, state.spoken + 1)
        state.text.extend(rows)
        state.spoken += len(rows)
        if state.thought.ended:
            state.text.append(self._eos)
            state.text_ended = True

    def _answer(self, state: TalkerState, begin: int) -> Tensor:
        """The rows `[tokens, width]` of the answer's tokens from `begin` on, so far as they have come."""
        thought = state.thought
        prompt = len(thought.prompt_ids)
        end = min(len(thought.answer_ids), thought.seen - prompt)
        if end <= begin:
            return self._eos[None][:0]
        text = self._thinker_embed(self._ids(thought.answer_ids[begin:end]))
        return text + thought.rows(prompt + begin, prompt + end).to(text)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(ids), device=self._stage.devices[0])

    def prompt(self, state: TalkerState) -> Prompt | None:
        """Once the first token of the answer has been through the thinker."""
        if not len(first := self._answer(state, 0)):
            return None
        thought = state.thought
        voice = self.voices[state.voice.lower()]
        ids = self._ids([*thought.prompt_ids, voice.bos, thought.answer_ids[0]])
        text = self._thinker_embed(ids[:-1])
        text[torch.isin(ids[:-1], self._media_ids)] = 0
        text[:-1] += thought.rows(0, len(thought.prompt_ids)).to(text)
        embeds = torch.cat([text, first[:1]])
        embeds[-2:] += self._begin
        rotary, offset = media_places(self.talker, ids, thought.media)
        state.begun = True
        self._follow(state)
        return Prompt(embeds, rotary, offset)

    def next_embed(self, state: TalkerState) -> Tensor | None:
        """The last code and the next row, or padding once the answer has ended."""
        return state.next_row(self._pad)

    def forward(self, embeds: Tensor, rotary: Tensor, view: View) -> Tensor:
        """Through the talker's transformer."""
        return self.talker.model(
            inputs_embeds=self.talker.thinker_to_talker_proj(embeds),
            position_ids=rotary.expand(3, -1, -1),
            attention_mask=view.mask,
            past_key_values=view,
            use_cache=True,
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the next code."""
        return self.talker.codec_head(hidden).masked_fill(self._never, float("-inf"))

    def complete(self, states: Sequence[TalkerState], hidden: Tensor, tokens: Sequence[int]) -> None:
        """A code each."""
        embeds = self.talker.get_input_embeddings()(self._ids(tokens))
        for state, token, embed in zip(states, tokens, embeds, strict=True):
            if state.length and state.text:
                state.text.popleft()
            state.tokens.append(token)
            ended = token in self._ends
            state.done = ended or len(state.tokens) >= state.sampling.max_tokens
            if not ended:
                state.codec = embed
                state.frames.append([token])

    def take(self, state: TalkerState) -> list[StepOutput]:
        """Codes in slices."""
        return state.take_frames(self._rate)

    def warm(self) -> list[TalkerState]:
        """A short answer."""
        voice = next(iter(self.voices))
        state = self.admit(StageRequest(request=-1, params={"voice": voice}, seed=0), Sampling(max_tokens=3))
        meta = {"prompt_token_ids": [0], "media": {}, "token_ids": [1, 2, 3]}
        hidden = torch.zeros(3, self._eos.shape[-1]).numpy()
        state.inputs.append(Chunk("thinker", meta, {"hidden": hidden}, final=True))
        return [state]


def create(config: StageConfig) -> Executor:
    """The executor of Qwen2.5-Omni's talker. Raises `ConfigError`."""
    return ArExecutor(config, Qwen25Talker(config))
