"""Diffusers pipelines of every family that the server steps, tiny and random."""

# diffusers annotates tuples of any length as tuples of one, and leaves out parameters of base configs.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    AutoencoderOobleck,
    CosineDPMSolverMultistepScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    StableAudioDiTModel,
    StableAudioPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from transformers import Gemma2Config, Gemma2Model
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from omni_async.stages.models.qwen_image_edit.processor import PictureProcessor
from tests.tiny import parts


def qwen_image() -> Any:
    """20 patches of prompt and picture in one attention."""
    tokenizer = parts.qwen_tokenizer()
    return QwenImagePipeline(
        scheduler=_qwen_scheduler(),
        vae=_qwen_vae(),
        text_encoder=parts.qwen_vl_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=_qwen_transformer(),
    )


def qwen_image_edit() -> Any:
    """The same, with the image in the prompt."""
    tokenizer = parts.qwen_tokenizer()
    return QwenImageEditPipeline(
        scheduler=_qwen_scheduler(),
        vae=_qwen_vae(),
        text_encoder=parts.qwen_vl_encoder(tokenizer),
        tokenizer=tokenizer,
        processor=PictureProcessor(Qwen2VLImageProcessorPil(), tokenizer, chat_template=parts.CHAT),
        transformer=_qwen_transformer(),
    )


def _qwen_scheduler() -> Any:
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def _qwen_vae() -> Any:
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.0, 0.8, 1.2, 0.9],
    ).eval()


def _qwen_transformer() -> Any:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
    ).eval()


def flux() -> Any:
    """One double and two single blocks, guidance embedded."""
    return FluxPipeline(**_flux_parts())


def flux_kontext() -> Any:
    """The same, with an image beside the picture."""
    return FluxKontextPipeline(**_flux_parts())


def _flux_parts() -> dict[str, Any]:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, shift=3.0
    )
    return {
        "scheduler": scheduler,
        "vae": parts.kl_vae(),
        "text_encoder": parts.clip_encoder(),
        "tokenizer": parts.clip_tokenizer(),
        "text_encoder_2": parts.t5_encoder(),
        "tokenizer_2": parts.t5_tokenizer(),
        "transformer": transformer.eval(),
    }


def flux2_klein() -> Any:
    """One double and two single blocks; three layers of its text encoder are read."""
    tokenizer = parts.qwen_tokenizer()
    transformer = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=96,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    vae = AutoencoderKLFlux2(
        sample_size=32,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    )
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=vae.eval(),
        text_encoder=parts.qwen3_encoder(tokenizer, 28, causal=True),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
    )


def stable_diffusion_3() -> Any:
    """Two joint blocks, the first with a second attention of the picture alone."""
    transformer = SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=64,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=96,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.kl_vae(),
        text_encoder=parts.clip_encoder(projected=True),
        tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.clip_encoder(projected=True),
        tokenizer_2=parts.clip_tokenizer(),
        text_encoder_3=parts.t5_encoder(64),
        tokenizer_3=parts.t5_tokenizer(),
    )


def stable_diffusion_xl() -> Any:
    """A U-Net of two levels."""
    unet = UNet2DConditionModel(
        block_out_channels=(16, 32),
        layers_per_block=1,
        sample_size=32,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=6 * 8 + 32,
        cross_attention_dim=64,
        norm_num_groups=4,
    )
    return StableDiffusionXLPipeline(
        vae=parts.kl_vae(shifted=False),
        text_encoder=parts.clip_encoder(),
        text_encoder_2=parts.clip_encoder(projected=True),
        tokenizer=parts.clip_tokenizer(),
        tokenizer_2=parts.clip_tokenizer(),
        unet=unet.eval(),
        scheduler=EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
    )


def z_image() -> Any:
    """Rows of any length in one forward pass."""
    tokenizer = parts.qwen_tokenizer()
    transformer = ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=4,
        n_kv_heads=4,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 128, 128],
    ).eval()
    with torch.no_grad():
        # They begin as zeros, which would hide what padding does.
        transformer.x_pad_token.normal_(0, 0.02)
        transformer.cap_pad_token.normal_(0, 0.02)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=parts.kl_vae(),
        text_encoder=parts.qwen3_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def sana() -> Any:
    """Linear attention over a VAE of eight pixels a latent."""
    text = Gemma2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
    )
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
        sample_size=32,
        patch_size=1,
    )
    vae = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    return SanaPipeline(
        tokenizer=parts.t5_tokenizer(300),
        text_encoder=Gemma2Model(text).eval(),
        vae=vae.eval(),
        transformer=transformer.eval(),
        scheduler=DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


def wan() -> Any:
    """Films and pictures."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    return WanPipeline(
        tokenizer=parts.t5_tokenizer(),
        text_encoder=parts.umt5_encoder(),
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


def stable_audio() -> Any:
    """Sound at 4 Hz."""
    transformer = StableAudioDiTModel(
        sample_size=64,
        in_channels=3,
        num_layers=2,
        attention_head_dim=4,
        num_key_value_attention_heads=2,
        out_channels=3,
        num_attention_heads=4,
        cross_attention_dim=4,
        time_proj_dim=8,
        global_states_input_dim=8,
        cross_attention_input_dim=4,
    )
    vae = AutoencoderOobleck(
        encoder_hidden_size=6,
        downsampling_ratios=[1, 2],
        decoder_channels=3,
        decoder_input_channels=3,
        audio_channels=2,
        channel_multiples=[2, 4],
        sampling_rate=4,
    )
    projection = StableAudioProjectionModel(text_encoder_dim=8, conditioning_dim=4, min_value=0, max_value=32)
    return StableAudioPipeline(
        transformer=transformer.eval(),
        scheduler=CosineDPMSolverMultistepScheduler(
            solver_order=2, prediction_type="v_prediction", sigma_data=1.0, sigma_schedule="exponential"
        ),
        vae=vae.eval(),
        text_encoder=parts.t5_encoder(8),
        tokenizer=parts.t5_tokenizer(128),
        projection_model=projection.eval(),
    )


def pixart_sigma() -> Any:
    """A pipeline that has no adapter."""
    transformer = PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=16,
        patch_size=2,
        caption_channels=32,
        use_additional_conditions=False,
    )
    return PixArtSigmaPipeline(
        tokenizer=parts.t5_tokenizer(300),
        text_encoder=parts.t5_encoder(),
        vae=parts.kl_vae(shifted=False),
        transformer=transformer.eval(),
        scheduler=DPMSolverMultistepScheduler(),
    )


BUILDERS: dict[str, Callable[[], Any]] = {
    build.__name__: build
    for build in (
        *(qwen_image, qwen_image_edit, flux, flux_kontext, flux2_klein, stable_diffusion_3),
        *(stable_diffusion_xl, z_image, sana, wan, stable_audio, pixart_sigma),
    )
}
