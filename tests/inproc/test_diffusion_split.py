"""Text encoders, denoising and VAE in three stages: the same pictures as in one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_async import AsyncOmni, AudioChunk, Image, ImageChunk, InvalidRequest, Progress, ServerConfig, Sound
from omni_async.config import ImageConfig, SoundConfig, StageConfig
from omni_async.errors import ConfigError
from omni_async.stages.registry import create_executor
from tests.stepping import as_uint8
from tests.tiny.folders import stock_pipeline, tiny_folder

pytestmark = pytest.mark.filterwarnings("ignore")


def deployment(family: str, tmp_path: Path, answers: str) -> Path:
    """A deploy YAML of three stages."""
    stages = [("text", "text_encoder", ""), ("denoise", "diffusion", "text"), ("decode", "vae", "denoise")]
    lines = ["name: split", f"model_arch: {family}", answers, "stages:"]
    for number, (name, kind, source) in enumerate(stages):
        lines += [f"- stage_id: {number}", f"  name: {name}", f"  kind: {kind}", "  max_num_seqs: 8"]
        lines += [f"  model: {tiny_folder(family)}", "  scheduling_policy: round_robin"]
        lines += [f"  inputs: [{source}]"] if source else []
        lines += ["  final_output: true"] if kind == "vae" else []
    path = tmp_path / "split.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


PICTURES = (
    "image: {multiple_of: 16, fields: [negative_prompt, guidance_scale, true_cfg_scale, lora], max_images: 1}"
)


@pytest.mark.parametrize(
    "family", ["stable_diffusion_3", "flux", "qwen_image", "sana", "wan", "stable_diffusion_xl"]
)
async def test_three_stages_draw_what_the_librarys_pipeline_draws(family: str, tmp_path: Path) -> None:
    scale = "true_cfg_scale" if family == "qwen_image" else "guidance_scale"
    wanted = [("a cat", 4, 4.0), ("a very long prompt about dogs", 3, 3.0), ("sky", 5, 1.0)]
    server = ServerConfig(single_process=True, deterministic=True)
    async with AsyncOmni(deploy_config=deployment(family, tmp_path, PICTURES), server=server) as omni:

        async def draw(number: int) -> ImageChunk:
            prompt, steps, weight = wanted[number]
            fields: dict[str, Any] = {scale: weight, "num_inference_steps": steps, "seed": number}
            request = Image(prompt=prompt, size="64x64", **fields)
            chunks = [chunk async for chunk in omni.generate(request)]
            assert isinstance(chunks[-1], ImageChunk)
            return chunks[-1]

        drawn = await asyncio.gather(*map(draw, range(3)))
    pipe = stock_pipeline(family)
    for number, (prompt, steps, weight) in enumerate(wanted):
        fields: dict[str, Any] = {scale: weight, "num_inference_steps": steps}
        if family == "qwen_image":
            fields["negative_prompt"] = " "
        if family == "sana":
            fields["use_resolution_binning"] = False
        if family == "wan":
            fields["num_frames"] = 1
        generator = torch.Generator().manual_seed(number)
        stock = pipe(prompt, width=64, height=64, generator=generator, output_type="np", **fields)[0][0]
        stock = stock[0] if family == "wan" else stock
        assert np.array_equal(drawn[number].pixels, as_uint8(np.asarray(stock)))


async def test_previews_and_progress_pass_through_the_vaes_stage(tmp_path: Path) -> None:
    path, server = deployment("flux", tmp_path, PICTURES), ServerConfig(single_process=True)
    async with AsyncOmni(deploy_config=path, server=server) as omni:
        request = Image(prompt="a cat", size="64x64", num_inference_steps=6, partial_images=2, progress=True)
        chunks = [chunk async for chunk in omni.generate(request)]
        images = (np.zeros((64, 64, 3), np.uint8),)
        changing = omni.generate(Image(prompt="x", images=images))
        with pytest.raises(InvalidRequest, match="takes no images"):
            await anext(changing)
    seen = [(type(chunk), chunk.step) for chunk in chunks if isinstance(chunk, Progress | ImageChunk)]
    previews = {2, 4}
    told = [(ImageChunk if step in previews else Progress, step) for step in range(1, 7)]
    assert seen == [*told, (ImageChunk, 6)]


async def test_sound_passes_through_three_stages_too(tmp_path: Path) -> None:
    answers = "sound: {sample_rate: 4, max_seconds: 32, fields: []}"
    path, server = deployment("stable_audio", tmp_path, answers), ServerConfig(single_process=True)
    async with AsyncOmni(deploy_config=path, server=server) as omni:
        calls = [
            [c async for c in omni.generate(Sound(prompt="rain", seconds=s, num_inference_steps=3, seed=1))]
            for s in (8.0, 5.0)
        ]
    for chunks, length in zip(calls, (32, 20), strict=True):
        assert isinstance(chunks[-1], AudioChunk)
        assert chunks[-1].pcm.shape == (length, 2)


async def test_a_family_that_needs_its_vae_before_cannot_be_split(tmp_path: Path) -> None:
    path, server = deployment("flux_kontext", tmp_path, PICTURES), ServerConfig(single_process=True)
    with pytest.raises(ConfigError, match="cannot be split"):
        await AsyncOmni(deploy_config=path, server=server).start()


@pytest.mark.parametrize(
    ("kind", "inputs", "option", "value"),
    [
        ("text_encoder", (), "vae_use_tiling", True),
        ("vae", ("denoise",), "quantization", "int8"),
        ("diffusion", ("text",), "preview_method", "latent"),
        ("diffusion", ("text",), "vae_use_slicing", True),
    ],
)
def test_a_setting_of_another_stage_is_refused(
    kind: str, inputs: tuple[str, ...], option: str, value: Any
) -> None:
    config = StageConfig(
        stage_id=0,
        name="s",
        kind=kind,
        inputs=inputs,
        final_output=kind == "vae",
        model=str(tiny_folder("flux")),
        model_arch="flux",
        engine_extras={option: value},
    )
    with pytest.raises(ConfigError, match=f"{option} cannot be combined"):
        create_executor(config).load()


def test_the_configs_of_what_is_answered_are_public() -> None:
    assert ImageConfig().max_images == 0 and SoundConfig(sample_rate=4).channels == 2
