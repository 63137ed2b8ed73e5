"""What a request for a picture, a film or sound resolves to, and what is refused by the name of its field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async import Image, ImageConfig, InvalidRequest, Lora, Sound, SoundConfig
from omni_async.image import nearest_size

FREE = ImageConfig(fields=("negative_prompt", "guidance_scale", "lora"), min_steps=2)
FIXED = ImageConfig(default_size="128x128", sizes=("128x128",), upscaled_sizes={"512x512": "128x128"})
CHANGING = ImageConfig(fields=("strength", "mask_image"), max_images=2, needs_image=True)
PIXELS = np.zeros((100, 203, 3), np.uint8)


def refused(config: ImageConfig, max_pixels: int | None = None, **fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        Image(**{"prompt": "cat", **fields}).resolve(config, max_pixels)
    return caught.value.param


def test_a_picture_resolves_to_what_was_given_and_nothing_else() -> None:
    request = Image(prompt="cat", size="64x96", guidance_scale=0.0, negative_prompt="", seed=0)
    params = request.resolve(FREE)
    assert params == {
        "prompt": "cat",
        "width": 64,
        "height": 96,
        "guidance_scale": 0.0,
        "negative_prompt": "",
    }


def test_no_size_and_auto_are_the_models_own_or_the_images() -> None:
    for size in (None, "auto"):
        assert Image(prompt="x", size=size).resolve(FREE)["width"] == 1024
        changed = Image(prompt="x", size=size, images=(PIXELS,)).resolve(CHANGING)
        assert (changed["width"], changed["height"]) == (208, 96)


def test_an_enlarged_size_is_drawn_small() -> None:
    params = Image(prompt="x", size="512x512").resolve(FIXED)
    assert params == {"prompt": "x", "width": 128, "height": 128, "upscale_to": (512, 512)}


@pytest.mark.parametrize(
    ("config", "fields", "param"),
    [
        (FREE, {"prompt": " \t"}, "prompt"),
        (FREE, {"size": "64X64"}, "size"),
        (FREE, {"size": "64x65"}, "size"),
        (FREE, {"true_cfg_scale": 2.0}, "true_cfg_scale"),
        (FREE, {"num_frames": 5}, "num_frames"),
        (FREE, {"num_inference_steps": 1}, "num_inference_steps"),
        (FREE, {"images": (PIXELS,)}, "image"),
        (FREE, {"strength": 0.5}, "strength"),
        (FREE, {"mask": PIXELS[..., 0]}, "mask_image"),
        (FREE, {"background": "transparent"}, "background"),
        (FREE, {"layers": 2}, "layers"),
        (FIXED, {"size": "256x256"}, "size"),
        (FIXED, {"lora": Lora(path="a")}, "lora"),
        (CHANGING, {}, "image"),
        (CHANGING, {"images": (PIXELS,) * 3}, "image"),
    ],
)
def test_what_the_model_cannot_do_is_refused(config: ImageConfig, fields: dict[str, Any], param: str) -> None:
    assert refused(config, **fields) == param


def test_a_picture_larger_than_the_server_makes_is_refused() -> None:
    assert refused(FREE, 512 * 512, size="1024x512") == "size"
    assert Image(prompt="x", size="512x512").resolve(FREE, 512 * 512)["width"] == 512


@given(width=st.integers(0, 99_999), height=st.integers(0, 99_999), limit=st.sampled_from([None, 300_000]))
def test_the_nearest_size_is_always_one_that_is_made(width: int, height: int, limit: int | None) -> None:
    for config in (FREE, FIXED):
        near = nearest_size(width, height, config, limit)
        params = Image(prompt="x", size=f"{near[0]}x{near[1]}").resolve(config, limit)
        assert params.get("upscale_to", (params["width"], params["height"])) == near


def test_sound_resolves_within_the_models_length() -> None:
    config = SoundConfig(sample_rate=44100, max_seconds=47.5, fields=("guidance_scale",))
    request = Sound(prompt="rain", seconds=3.0, guidance_scale=2.0, progress=True)
    assert request.resolve(config) == {
        "prompt": "rain",
        "seconds": 3.0,
        "guidance_scale": 2.0,
        "progress": True,
    }
    assert Sound(prompt="rain").resolve(config)["seconds"] == 47.5
    for fields, param in (
        ({"seconds": 48.0}, "seconds"),
        ({"negative_prompt": "x"}, "negative_prompt"),
        ({"prompt": " "}, "prompt"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            Sound(**{"prompt": "rain", **fields}).resolve(config)
        assert caught.value.param == param
