"""Qwen3-Omni's talker: the thinker's text, token by token, to frames of codes.

The prompt is that of `Qwen3OmniMoeForConditionalGeneration.generate`: the users' turns (text by the thinker's
embeddings, media by its hidden states), then the assistant's first token beside the voice. What follows is
laid over the codes, a token a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from omni_async.config import StageConfig
from omni_async.errors import StageFailed
from omni_async.stages.ar.cache import RaggedCache, View
from omni_async.stages.ar.executor import ArExecutor
from omni_async.stages.ar.loading import Dtype, load_model, read_settings, torch_dtype
from omni_async.stages.ar.model import Prompt
from omni_async.stages.ar.sampling import Sampling
from omni_async.stages.ar.talker import TalkerState, check_voice, last_index, media_places
from omni_async.stages.executor import Chunk, Executor, StageRequest, StepOutput
from omni_async.stages.models.qwen3_omni.code_predictor import CodePredictor
from omni_async.stages.models.qwen3_omni.parts import TalkerPart
from omni_async.stages.models.qwen3_omni.rates import SAMPLE_RATE, samples_per_frame

RESERVED = 1024
"""The talker's last ids, none of which but the end is ever chosen (as in the reference implementation)."""

ASSISTANT_HEAD = 3
"""`<|im_start|>assistant\\n`: what is before the first token that is spoken."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`slices` are the frames in each chunk that leaves; the last number stands for all that follow."""

    dtype: Dtype = "auto"
    slices: tuple[int, ...] = (4, 8, 16, 25)


class Qwen3Talker:
    """The talker as an `ArModel`."""

    def __init__(self, config: StageConfig) -> None:
        self._stage = config
        self._settings = read_settings(config, Settings)

    def load(self, slots: int) -> RaggedCache:
        """Load the talker and the thinker's embeddings. Raises `ConfigError`."""
        device = self._stage.devices[0]
        dtype = torch_dtype(self._settings.dtype, device)
        part: Any = load_model(TalkerPart, self._stage, dtype)
        self.config = part.config
        self.talker = part.talker
        # transformers 5.19 looks here for the rate of audio tokens, where no checkpoint has it.
        self.talker.config.audio_config = self.config.thinker_config.audio_config
        self._thinker_embed = part.thinker.model.embed_tokens
        self._predictor = CodePredictor(self.talker.code_predictor, slots)
        self._rate = SAMPLE_RATE / samples_per_frame(self.config)
        codec, text = self.config.talker_config, self.config.talker_config.text_config
        self._never = torch.arange(text.vocab_size, device=device) >= text.vocab_size - RESERVED
        self._never[codec.codec_eos_token_id] = False
        specials = [self.config.tts_bos_token_id, self.config.tts_eos_token_id, self.config.tts_pad_token_id]
        with torch.inference_mode():
            self._bos, self._eos, self._pad = self._project(specials)
        media = self.config.thinker_config
        self._media_ids = torch.tensor([media.audio_token_id, media.image_token_id, media.video_token_id])
        return RaggedCache(
            text.num_hidden_layers, slots, text.num_key_value_heads, text.head_dim, dtype=dtype, device=device
        )

    def admit(self, request: StageRequest, sampling: Sampling) -> TalkerState:
        """Raises `InvalidRequest` for a voice that the checkpoint has not."""
        check_voice(self.config.talker_config.speaker_id, request.params["voice"])
        return TalkerState(request, sampling, self._settings.slices)

    def read(self, state: TalkerState) -> None:
        """Take the thinker's chunks in, and the text that follows the prompt."""
        if state.inputs:
            state.thought.read(state)
        if state.begun:
            self._follow(state)
        elif state.thought.ended and self._spoken_ids(state)[ASSISTANT_HEAD:] == []:
            state.done = True

    def _spoken_ids(self, state: TalkerState) -> list[int]:
        """The assistant's turn, from its head on."""
        thought = state.thought
        head = last_index(thought.prompt_ids, (self.config.im_start_token_id, self.config.assistant_token_id))
        return [*thought.prompt_ids[head:], *thought.answer_ids]

    def _follow(self, state: TalkerState) -> None:
        """Queue what has come since: the text after its first token, and its end."""
        if state.text_ended:
            return
        spoken = self._spoken_ids(state)[ASSISTANT_HEAD + 1 + state.spoken :]
        if spoken:
            state.text.extend(self._project(spoken))
            state.spoken += len(spoken)
        if state.thought.ended:
            state.text.append(self._eos)
            state.text_ended = True

    def _project(self, ids: Sequence[int]) -> Tensor:
        """Tokens as the talker reads them, `[tokens, width]`."""
        return self.talker.text_projection(self._thinker_embed(self._ids(ids)))

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(ids), device=self._stage.devices[0])

    def prompt(self, state: TalkerState) -> Prompt | None:
        """Once the first spoken token is there."""
        if not state.thought.prompt_ids or len(spoken := self._spoken_ids(state)) <= ASSISTANT_HEAD:
            return None
        users, ids = self._users(state)
        embeds = torch.cat([users, self._assistant(spoken[: ASSISTANT_HEAD + 1], state.voice)])
        fill = [self.config.tts_pad_token_id] * (len(embeds) - len(ids))
        places = torch.cat([ids, self._ids(fill)])
        rotary, offset = media_places(self.talker, places, state.thought.media)
        state.begun = True
        self._follow(state)
        return Prompt(embeds, rotary, offset)

    def _users(self, state: TalkerState) -> tuple[Tensor, Tensor]:
        """The users' turns, rows `[positions, width]` and token ids `[positions]`."""
        prompt = self._ids(state.thought.prompt_ids)
        theirs = _turns_of(prompt, self.config.im_start_token_id, self.config.user_token_id)
        ids = prompt[theirs]
        media = torch.isin(ids, self._media_ids.to(ids.device))
        rows = self._project(ids.tolist()) if len(ids) else self._pad[None][:0]
        if media.any():
            if state.thought.seen < len(prompt):
                raise StageFailed("The thinker sent no hidden states of this conversation's media.")
            seen = state.thought.rows(0, len(prompt)).to(rows)[theirs][media]
            rows[media] = self.talker.hidden_projection(seen)
        return rows, ids

    def _assistant(self, spoken: Sequence[int], voice: str) -> Tensor:
        """The head of the assistant's turn and its first token, beside the codes that set the voice."""
        codec = self.config.talker_config
        head = self._project(spoken)
        before = [head[:ASSISTANT_HEAD], self._pad.expand(4, -1), self._bos[None]]
        text = torch.cat([*before, head[ASSISTANT_HEAD:]])
        codes = [codec.codec_nothink_id, codec.codec_think_bos_id, codec.codec_think_eos_id]
        codes += [codec.speaker_id[voice.lower()], codec.codec_pad_id, codec.codec_bos_id]
        text[ASSISTANT_HEAD:] += self.talker.get_input_embeddings()(self._ids(codes))
        return text

    def next_embed(self, state: TalkerState) -> Tensor | None:
        """The last frame's codes and the next token, or padding once the text has ended."""
        return state.next_row(self._pad)

    def forward(self, embeds: Tensor, rotary: Tensor, view: View) -> Tensor:
        """Through the talker's transformer."""
        return self.talker.model(
            inputs_embeds=embeds,
            position_ids=rotary.expand(3, -1, -1),
            attention_mask=view.mask,
            past_key_values=view,
            use_cache=True,
        ).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the first code of each frame."""
        return self.talker.codec_head(hidden).masked_fill(self._never, float("-inf"))

    def complete(self, states: Sequence[TalkerState], hidden: Tensor, tokens: Sequence[int]) -> None:
        """The rest of each frame, by the code predictor."""
        going = [index for index, token in enumerate(tokens) if not self._ends(states[index], token)]
        frames: dict[int, tuple[list[int], Tensor]] = {}
        if going:
            first = self.talker.get_input_embeddings()(self._ids([tokens[index] for index in going]))
            samplers = [(states[index].sampler, len(states[index].tokens)) for index in going]
            codes, total = self._predictor.residuals(hidden[going], first, samplers)
            for index, row, embed in zip(going, codes.tolist(), total, strict=True):
                frames[index] = [tokens[index], *row], embed
        for index, (state, token) in enumerate(zip(states, tokens, strict=True)):
            if state.length and state.text:
                state.text.popleft()
            state.tokens.append(token)
            state.done = index not in frames
            if index in frames:
                frame, state.codec = frames[index]
                state.frames.append(frame)

    def _ends(self, state: TalkerState, token: int) -> bool:
        """The end, or the last token that may be: as in the reference implementation it makes no frame."""
        last = len(state.tokens) + 1 >= state.sampling.max_tokens
        return last or token == self.config.talker_config.codec_eos_token_id

    def take(self, state: TalkerState) -> list[StepOutput]:
        """Frames in slices."""
        return state.take_frames(self._rate)

    def warm(self) -> list[TalkerState]:
        """A short answer."""
        config, voice = self.config, next(iter(self.config.talker_config.speaker_id))
        request = StageRequest(request=-1, params={"voice": voice, "max_tokens": 3}, seed=0)
        state = self.admit(request, Sampling(max_tokens=3))
        prompt = [config.im_start_token_id, config.assistant_token_id, 0]
        meta = {"prompt_token_ids": prompt, "media": {}, "token_ids": [1, 2, 3]}
        state.inputs.append(Chunk("thinker", meta, {}, final=True))
        return [state]


def _turns_of(ids: Tensor, start: int, role: int) -> Tensor:
    """Which positions belong to turns of `role`."""
    places = torch.arange(len(ids), device=ids.device)
    begun = torch.where(ids == start, places, -1).cummax(0).values.clamp_min(0)
    return ids[(begun + 1).clamp_max(len(ids) - 1)] == role


def create(config: StageConfig) -> Executor:
    """The executor of Qwen3-Omni's talker. Raises `ConfigError`."""
    return ArExecutor(config, Qwen3Talker(config))
