"""What was trained as a stock `StableDiffusion3Pipeline` folder, float16."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from examples.train_pictor import captions
from examples.train_pictor.networks import WIDTH, Colours, Model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(args.run / "tokenizer")
    # Any: the pipeline is annotated with larger classes than it needs.
    model: Any = Model(args.layers, max(4096, len(tokenizer)))
    vae: Any = Colours(captions.stacked(captions.load_things(args.data))).vae()
    model.load_state_dict(load_file(args.run / "model.safetensors"))
    pipe = StableDiffusion3Pipeline(
        transformer=model.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=model.encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=model.encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=silent_encoder(),
        tokenizer_3=silent_tokenizer(),
    )
    pipe.to(torch.float16).save_pretrained(args.output, safe_serialization=True)


def silent_encoder() -> T5EncoderModel:
    """Zeros for every token: what the pipeline takes for a missing third encoder, as a folder that loads
    without being told so."""
    config = T5Config(
        vocab_size=8, d_model=WIDTH, d_kv=8, d_ff=8, num_layers=1, num_heads=1, pad_token_id=0, eos_token_id=1
    )
    encoder = T5EncoderModel(config)
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.zero_()
    return encoder


def silent_tokenizer() -> Any:
    """Every word is unknown."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=256,
    )


if __name__ == "__main__":
    main()
