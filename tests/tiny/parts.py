"""Tokenizers, text encoders and VAEs of a few thousand random parameters."""

# diffusers annotates tuples of any length as tuples of one, and leaves out parameters of base configs.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
QWEN_MARKS = [
    *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<think>", "</think>"),
]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_tokenizer() -> Any:
    """Bytes, with Qwen's marks and a chat template."""
    tokenizer = Qwen2Tokenizer(
        vocab={byte: index for index, byte in enumerate(BYTES)}, merges=[], pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": QWEN_MARKS})
    tokenizer.chat_template = CHAT
    return tokenizer


def clip_tokenizer() -> Any:
    """Bytes, 77 tokens at most."""
    words = [*BYTES, *(byte + "</w>" for byte in BYTES), "<|startoftext|>", "<|endoftext|>"]
    vocab = {word: index for index, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer(length: int = 512) -> Any:
    """Printable ASCII, each character a token."""
    letters = [(chr(code), -3.0) for code in range(33, 127)]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *letters]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=length)


def clip_encoder(*, projected: bool = False, width: int = 32) -> Any:
    """Two layers; with `projected` its pooled output is a projection."""
    vocab = 514
    config = CLIPTextConfig(
        bos_token_id=vocab - 2,
        eos_token_id=vocab - 1,
        pad_token_id=vocab - 1,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=4,
        num_hidden_layers=2,
        projection_dim=width,
        vocab_size=vocab,
        hidden_act="gelu",
        initializer_range=0.2,
    )
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config).eval()


def t5_encoder(width: int = 32) -> Any:
    """Two layers."""
    return T5EncoderModel(_t5(T5Config, width)).eval()


def umt5_encoder(width: int = 32) -> Any:
    """Two layers."""
    return UMT5EncoderModel(_t5(UMT5Config, width)).eval()


def _t5(config: Any, width: int) -> Any:
    shape: dict[str, Any] = {"d_model": width, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return config(vocab_size=128, feed_forward_proj="gated-gelu", **shape)


def qwen_vl_encoder(tokenizer: Any) -> Any:
    """Two text layers and one of vision."""
    ids = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("image_pad", "video_pad", "vision_start", "vision_end")
    }
    rotations = {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"}
    config = Qwen2_5_VLConfig(
        text_config={
            **_qwen_shape(len(tokenizer)),
            "rope_scaling": rotations,
            "rope_theta": 1e6,
            "max_position_embeddings": 4096,
        },
        vision_config={
            **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2},
            "out_hidden_size": 32,
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        vocab_size=len(tokenizer),
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen3_encoder(tokenizer: Any, layers: int = 2, *, causal: bool = False) -> Any:
    """A Qwen3 of `layers` layers, with a language-model head where `causal`."""
    shape = {**_qwen_shape(len(tokenizer)), "num_hidden_layers": layers}
    config = Qwen3Config(head_dim=16, max_position_embeddings=1024, **shape)
    return (Qwen3ForCausalLM if causal else Qwen3Model)(config).eval()


def _qwen_shape(vocab: int) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": vocab}
    return {**sizes, "num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.2}


def kl_vae(channels: int = 4, *, shifted: bool = True) -> Any:
    """Eight pixels a latent."""
    scaling: dict[str, Any] = {"scaling_factor": 0.13025}
    if shifted:
        scaling = {"shift_factor": 0.0609, "scaling_factor": 1.5035}
        scaling |= {"use_quant_conv": False, "use_post_quant_conv": False}
    return AutoencoderKL(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        **scaling,
    ).eval()
