"""Qwen-Omni checkpoints that hear, see and speak: random, sanely scaled, complete down to the processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny.cache import built_once

WORDS = 256
"""Ids below are bytes."""

NAMES = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "system",
    "user",
    "assistant",
    "<|audio_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)
ID = {name.strip("<|>"): WORDS + index for index, name in enumerate(NAMES)}
VOCABULARY = 320

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'audio' or 'audio_url' in part %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif part['type'] == 'video' or 'video_url' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 64 << 20,
    "skip_mm_profiling": True,
}
"""vLLM's arguments for a thinker of this size on a CPU."""


def tiny_qwen3_omni() -> Path:
    """Qwen3-Omni-MoE, 1 MB: thinker, talker with four code groups, code2wav of 48 samples a frame."""
    return built_once("qwen3-omni", build_qwen3_omni)


def build_qwen3_omni(folder: Path, **sizes: Any) -> None:
    """Write the checkpoint; `sizes` replace those of `QWEN3`."""
    import torch
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    torch.manual_seed(0)
    config = Qwen3OmniMoeConfig(**qwen3_config({**QWEN3, **sizes}))
    model = Qwen3OmniMoeForConditionalGeneration(config).eval()
    enliven(model)
    soften(model.code2wav.decoder[-1])
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = ID["im_end"]
    model.save_pretrained(folder)
    save_processor(folder, "Qwen3OmniMoeProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor")


QWEN3: dict[str, Any] = {
    "hidden": 64,
    "layers": 3,
    "heads": 2,
    "experts": 4,
    "width": 64,
    "codebook": 64,
    "groups": 4,
    "predictor_layers": 2,
    "decoder": 32,
    "codec_hidden": 32,
    "upsample_rates": [4, 3],
}


def qwen3_config(size: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `Qwen3OmniMoeConfig`."""
    hidden, codebook, groups = size["hidden"], size["codebook"], size["groups"]
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
        "interleaved": True,
    }
    dense: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": size["width"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["heads"],
        "head_dim": 32,
    }
    sparse: dict[str, Any] = {
        **dense,
        "num_hidden_layers": size["layers"],
        "num_experts": size["experts"],
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size["width"],
        "rope_parameters": rope,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    media = {
        "audio_token_id": ID["audio_pad"],
        "image_token_id": ID["image_pad"],
        "video_token_id": ID["video_pad"],
        "vision_start_token_id": ID["vision_start"],
        "audio_start_token_id": ID["audio_start"],
    }
    return {
        "thinker_config": {
            "text_config": {"vocab_size": VOCABULARY, **sparse},
            "audio_config": _audio_config(hidden),
            "vision_config": {
                **_vision_config(hidden),
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
                "image_size": 128,
                "apply_vit_abs_pos_embed": True,
            },
            **media,
            "user_token_id": ID["user"],
            "vision_end_token_id": ID["vision_end"],
        },
        "talker_config": {
            "text_config": {
                **sparse,
                "vocab_size": 1024 + codebook,
                "shared_expert_intermediate_size": size["width"],
            },
            "code_predictor_config": {
                **dense,
                "vocab_size": codebook,
                "num_hidden_layers": size["predictor_layers"],
                "num_code_groups": groups,
            },
            "num_code_groups": groups,
            "thinker_hidden_size": hidden,
            "accept_hidden_layer": size["layers"] - 1,
            **{f"codec_{name}_id": codebook + i for i, name in enumerate(CODEC)},
            "speaker_id": {"ethan": codebook + 10, "chelsie": codebook + 11, "aiden": codebook + 12},
            **media,
            "spatial_merge_size": 2,
        },
        "code2wav_config": {
            "codebook_size": codebook,
            "hidden_size": size["codec_hidden"],
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "sliding_window": 8,
            "intermediate_size": 2 * size["codec_hidden"],
            "num_hidden_layers": 2,
            "num_quantizers": groups,
            "upsample_rates": size["upsample_rates"],
            "upsampling_ratios": [2, 2],
            "decoder_dim": size["decoder"],
        },
        "im_start_token_id": ID["im_start"],
        "im_end_token_id": ID["im_end"],
        "tts_pad_token_id": ID["tts_pad"],
        "tts_bos_token_id": ID["tts_text_bos"],
        "tts_eos_token_id": ID["tts_text_eod"],
        "system_token_id": ID["system"],
        "user_token_id": ID["user"],
        "assistant_token_id": ID["assistant"],
    }


def tiny_qwen25_omni() -> Path:
    """Qwen2.5-Omni, 3 MB: thinker, talker, token2wav of 480 samples a code, and two voices."""
    return built_once("qwen2.5-omni", build_qwen25_omni)


def build_qwen25_omni(folder: Path) -> None:
    """Write the checkpoint."""
    import torch
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    torch.manual_seed(0)
    model = Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**qwen25_config())).eval()
    enliven(model)
    with torch.no_grad():
        # Mels of a trained model's size, and samples that are not clipped.
        model.token2wav.code2wav_dit_model.proj_out.weight.mul_(0.02)
        model.token2wav.code2wav_bigvgan_model.conv_post.weight.mul_(0.02)
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = ID["im_end"]
    model.save_pretrained(folder)
    voices = {
        name: {
            "bos_token": ID["tts_text_bos"],
            "cond": torch.randn(1, QWEN25_SPEAKER),
            "ref_mel": torch.randn(1, 20 + 10 * index, 80),
        }
        for index, name in enumerate(("Chelsie", "Ethan"))
    }
    torch.save(voices, folder / "spk_dict.pt")
    save_processor(folder, "Qwen2_5OmniProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", patch=14)


QWEN25_CODES = 96
QWEN25_SPEAKER = 16


def qwen25_config() -> dict[str, Any]:
    """Arguments of `Qwen2_5OmniConfig`."""
    dense: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
        "max_position_embeddings": 4096,
    }
    media = {
        "audio_token_index": ID["audio_pad"],
        "image_token_index": ID["image_pad"],
        "video_token_index": ID["video_pad"],
        "vision_start_token_id": ID["vision_start"],
        "vision_end_token_id": ID["vision_end"],
        "audio_start_token_id": ID["audio_start"],
        "audio_end_token_id": ID["audio_end"],
    }
    channels = 32
    return {
        "thinker_config": {
            "text_config": {"vocab_size": VOCABULARY, "tie_word_embeddings": False, **dense},
            "audio_config": {
                "num_mel_bins": 128,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                "d_model": 64,
                "output_dim": 64,
            },
            "vision_config": {**_vision_config(64), "fullatt_block_indexes": [1]},
            **media,
            "user_token_id": ID["user"],
        },
        "talker_config": {
            **dense,
            "vocab_size": QWEN25_CODES,
            "embedding_size": 64,
            "head_dim": 32,
            "tts_text_start_token_id": ID["tts_text_bos"],
            "tts_text_end_token_id": ID["tts_text_eod"],
            "tts_text_pad_token_id": ID["tts_pad"],
            "tts_codec_start_token_id": QWEN25_CODES - 4,
            "tts_codec_end_token_id": QWEN25_CODES - 3,
            "tts_codec_pad_token_id": QWEN25_CODES - 2,
            "tts_codec_mask_token_id": QWEN25_CODES - 1,
            **media,
        },
        "token2wav_config": {
            "dit_config": {
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "head_dim": 32,
                "emb_dim": 32,
                "block_size": 24,
                "look_ahead_layers": [2],
                "look_backward_layers": [0, 3],
                "num_embeds": QWEN25_CODES,
                "enc_emb_dim": QWEN25_SPEAKER,
                "enc_dim": 16,
                "enc_channels": [channels, channels, channels, channels, 3 * channels],
                "enc_attention_channels": 8,
                "enc_se_channels": 8,
            },
            "bigvgan_config": {"upsample_initial_channel": 64},
        },
    }


def tiny_qwen25_vl() -> Path:
    """Qwen2.5-VL, 1 MB: sees and writes."""
    return built_once("qwen2.5-vl", _build_qwen25_vl)


def _build_qwen25_vl(folder: Path) -> None:
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    parts = qwen25_config()["thinker_config"]
    config = Qwen2_5_VLConfig(
        text_config={**parts["text_config"], "eos_token_id": ID["im_end"], "pad_token_id": ID["endoftext"]},
        vision_config=parts["vision_config"],
        image_token_id=ID["image_pad"],
        video_token_id=ID["video_pad"],
        vision_start_token_id=ID["vision_start"],
        vision_end_token_id=ID["vision_end"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
    enliven(model)
    model.generation_config.do_sample = False
    model.generation_config.eos_token_id = ID["im_end"]
    model.save_pretrained(folder)
    save_processor(folder, "Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor", patch=14)


CODEC = ("eos_token", "pad", "bos", "nothink", "think_bos", "think_eos")


def _audio_config(hidden: int) -> dict[str, Any]:
    return {
        "num_mel_bins": 128,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "d_model": 64,
        "output_dim": hidden,
        "downsample_hidden_size": 8,
        "n_window": 50,
        "n_window_infer": 100,
    }


def _vision_config(hidden: int) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": hidden,
    }


def enliven(model: Any) -> None:
    """Weights that pass their input on at its own scale, so that every part of the model is heard."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2 and "embed" in name:
                weight.normal_(0, 1)
            elif weight.ndim >= 2:
                fan = weight.shape[-1] if "experts" in name else weight[0].numel()
                weight.normal_(0, fan**-0.5)
            elif "gamma" in name or name.endswith("layer_scale.scale"):
                weight.fill_(0.5)


def soften(last: Any) -> None:
    """Scale a decoder's last convolution down: its waveform is clipped at 1 otherwise, and no longer shows
    what comes before."""
    import torch

    with torch.no_grad():
        last.conv.weight.mul_(0.03)


def save_processor(folder: Path, processor: str, image: str, video: str, *, patch: int = 16) -> None:
    """Tokenizer (bytes), chat template, and processors for small pictures and films."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    words.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.add_tokens(list(NAMES), special_tokens=True)
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    for name in ("image", "audio", "video"):
        tokenizer.init_kwargs[f"{name}_token"] = f"<|{name}_pad|>"
    for name in ("vision", "audio"):
        tokenizer.init_kwargs[f"{name}_bos_token"] = f"<|{name}_start|>"
        tokenizer.init_kwargs[f"{name}_eos_token"] = f"<|{name}_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=128, sampling_rate=16000, hop_length=160, n_fft=400).save_pretrained(
        folder
    )
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    least, most = (2 * patch) ** 2, (4 * patch) ** 2
    pixels = {
        "min_pixels": least,
        "max_pixels": most,
        "size": {"shortest_edge": least, "longest_edge": most},
    }
    patches = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2, **pixels}
    settings |= {"processor_class": processor, "image_processor_type": image, **patches}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    film = {"processor_class": processor, "video_processor_type": video, **patches, "do_sample_frames": False}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(film))
