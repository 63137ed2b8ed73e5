"""The networks, all of stock classes: a transformer of Stable Diffusion 3's kind, two text encoders that are
trained with it, and a VAE that needs no training."""

from __future__ import annotations

import re
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTiny
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from examples.train_pictor.attention import MaskedJointAttention, standing_for

LENGTH = 12
"""Tokens of a caption."""
WIDTH = 256
PATCHES = 16
"""Of a picture: 4 × 4, each of 8 × 8."""
SCALE = 20.0


def make_transformer(layers: int = 4) -> SD3Transformer2DModel:
    """10 million parameters: 16 patches of 8 × 8. Initialised as in the DiT paper (adaLN-zero)."""
    network = SD3Transformer2DModel(
        sample_size=32,
        patch_size=8,
        in_channels=3,
        out_channels=3,
        num_layers=layers,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=4,
        qk_norm="rms_norm",
    )
    for name, weight in network.named_parameters():
        if weight.dim() >= 2:
            nn.init.xavier_uniform_(weight.view(weight.shape[0], -1))
        elif name.endswith("bias"):
            nn.init.zeros_(weight)
    for name, weight in network.named_parameters():
        if re.search(r"norm1\.linear|norm1_context\.linear|norm_out\.linear|^proj_out", name):
            nn.init.zeros_(weight)
    return network


def make_encoder(vocabulary: int = 4096) -> CLIPTextModelWithProjection:
    """Two layers of width 128."""
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        projection_dim=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        hidden_act="gelu",
        bos_token_id=1,
        eos_token_id=3,
        pad_token_id=0,
    )
    return CLIPTextModelWithProjection(config)


class Model(nn.Module):
    """All that is trained."""

    def __init__(self, layers: int = 4, vocabulary: int = 4096) -> None:
        super().__init__()
        self.transformer = make_transformer(layers)
        # Any callable will do, though diffusers names only its own classes.
        processor: Any = MaskedJointAttention()
        self.transformer.set_attn_processor(processor)
        self.encoders = nn.ModuleList([make_encoder(vocabulary), make_encoder(vocabulary)])

    def forward(self, latents: Tensor, times: Tensor, ids: Tensor, padding: int) -> Tensor:
        """Predicted velocities `[rows, 3, 32, 32]` as if `padding` zero tokens followed the caption, as the
        pipeline puts them in the place of a third text encoder. One of their weight is five times as fast."""
        outputs = [encoder(ids, output_hidden_states=True) for encoder in self.encoders]
        hidden = torch.cat([each.hidden_states[-2] for each in outputs], -1)
        hidden = torch.cat([hidden, hidden.new_zeros(len(hidden), 1, WIDTH)], 1)
        pooled = torch.cat([each.text_embeds for each in outputs], -1)
        mask = {"attention_mask": standing_for(padding, PATCHES + hidden.shape[1])}
        return self.transformer(
            latents, hidden, pooled, times * 1000, joint_attention_kwargs=mask, return_dict=False
        )[0]


class Colours:
    """Latents are colours, turned to brightness and two chromas by the data's covariance, and whitened."""

    def __init__(self, pictures: Tensor) -> None:
        pixels = pictures.permute(0, 2, 3, 1).reshape(-1, 3).double()
        values, axes = torch.linalg.eigh(torch.cov(pixels.T))
        deviation = values.flip(0).sqrt()
        # Weak chromas are not blown up to the strength of brightness.
        deviation = torch.maximum(deviation, deviation[0] * 0.45)
        self.mean = pixels.mean(0).float()
        self.forward = (axes.flip(1) / deviation).T.float()
        self.inverse = (axes.flip(1) * deviation).float()

    def encode(self, pictures: Tensor) -> Tensor:
        """`[rows, 3, height, width]` in [-1, 1] → latents."""
        return torch.einsum("ij,bjhw->bihw", self.forward, pictures - self.mean[:, None, None])

    def vae(self) -> AutoencoderTiny:
        """The same as an `AutoencoderTiny`: box means of 4 × 4 going in, bicubic enlargement coming out."""
        sizes, none = (6, 6, 6), (0, 0, 0)
        vae = AutoencoderTiny(
            encoder_block_out_channels=sizes,
            decoder_block_out_channels=sizes,
            num_encoder_blocks=none,
            num_decoder_blocks=none,
            latent_channels=3,
            scaling_factor=SCALE,
            shift_factor=0.0,
            upsample_fn="bicubic",
        )
        with torch.no_grad():
            for weight in vae.parameters():
                weight.zero_()
            self._set_encoder(convolutions(vae.encoder))
            self._set_decoder(convolutions(vae.decoder))
        return vae

    def _set_encoder(self, layers: list[nn.Conv2d]) -> None:
        first, *downs, last = layers
        first.weight[:3, :, 1, 1] = 2 * self.forward
        biases(first)[:3] = -(self.forward @ (self.mean + 1))
        for layer in downs:
            for channel in range(3):
                layer.weight[channel, channel, 1:, 1:] = 0.25
        last.weight[:, :3, 1, 1] = torch.eye(3) / SCALE

    def _set_decoder(self, layers: list[nn.Conv2d]) -> None:
        first, *ups, last = layers
        # A value and its negative in two channels, so that the ReLU between loses neither.
        first.weight[:3, :, 1, 1] = SCALE * torch.eye(3)
        first.weight[3:, :, 1, 1] = -SCALE * torch.eye(3)
        for layer in ups:
            layer.weight[:, :, 1, 1] = torch.eye(6)
        last.weight[:, :3, 1, 1] = self.inverse / 2
        last.weight[:, 3:, 1, 1] = -self.inverse / 2
        biases(last)[:] = (self.mean + 1) / 2


def convolutions(network: nn.Module) -> list[nn.Conv2d]:
    """In their order."""
    return [each for each in network.modules() if isinstance(each, nn.Conv2d)]


def biases(layer: nn.Conv2d) -> Tensor:
    """Those of a layer that has some."""
    assert layer.bias is not None
    return layer.bias
