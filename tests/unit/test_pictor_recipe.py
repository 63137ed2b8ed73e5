"""The parts of the picture model's recipe. That it makes a folder that draws is checked in `tests/parity`."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from examples.train_pictor import captions, check
from examples.train_pictor.networks import LENGTH, SCALE, WIDTH, Colours, Model, make_transformer

ROWS = 2


def make_model() -> Model:
    """Not as initialised: that predicts zeros for whatever it is given."""
    torch.manual_seed(0)
    model = Model(layers=2, vocabulary=64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def make_thing(label: str, picture: Tensor, *tags: str) -> captions.Thing:
    return captions.Thing(label, list(tags), picture)


def make_things() -> list[captions.Thing]:
    pictures = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    labels = ["red apple", "green apple", "ship"]
    return [
        make_thing(label, picture, "fruit", "round") for label, picture in zip(labels, pictures, strict=True)
    ]


def stock_velocities(model: Model, latents: Tensor, times: Tensor, ids: Tensor, padding: int) -> Tensor:
    """What the exported transformer predicts, with diffusers' own attention and every zero token there."""
    transformer = make_transformer(layers=2).eval()
    transformer.load_state_dict(model.transformer.state_dict())
    outputs = [encoder(ids, output_hidden_states=True) for encoder in model.encoders]
    hidden = torch.cat([each.hidden_states[-2] for each in outputs], -1)
    hidden = torch.cat([hidden, torch.zeros(ROWS, padding, WIDTH)], 1)
    pooled = torch.cat([each.text_embeds for each in outputs], -1)
    return transformer(latents, hidden, pooled, times * 1000, return_dict=False)[0]


@torch.no_grad()
def test_one_weighted_token_stands_for_all_the_zero_tokens_of_the_pipeline() -> None:
    model = make_model()
    latents, times = torch.randn(ROWS, 3, 32, 32), torch.tensor([0.3, 0.8])
    ids = torch.randint(4, 64, (ROWS, LENGTH))
    trained = {padding: model(latents, times, ids, padding) for padding in (1, 16, 256)}
    for padding, velocities in trained.items():
        torch.testing.assert_close(
            velocities, stock_velocities(model, latents, times, ids, padding), rtol=1e-4, atol=1e-5
        )
    assert (trained[1] - trained[256]).abs().max() > 1e-2


@torch.no_grad()
def test_the_vae_is_the_turn_of_the_colours_between_a_box_mean_and_an_enlargement() -> None:
    pictures = torch.stack([thing.picture for thing in make_things()])
    colours = Colours(pictures)
    vae = colours.vae()
    large = torch.rand(2, 3, 128, 128, generator=torch.Generator().manual_seed(1)) * 2 - 1
    latents = vae.encode(large, return_dict=False)[0] * SCALE
    torch.testing.assert_close(latents, colours.encode(avg_pool2d(large, 4)), rtol=1e-4, atol=1e-4)
    flat = torch.tensor([0.5, -0.25, 0.75])[None, :, None, None].expand(1, 3, 32, 32)
    decoded = vae.decode(colours.encode(flat) / SCALE, return_dict=False)[0]
    torch.testing.assert_close(decoded, flat[..., :1, :1].expand(1, 3, 128, 128), rtol=1e-4, atol=1e-4)


def test_latents_of_the_training_pictures_are_centred_and_no_channel_is_stronger_than_brightness() -> None:
    pictures = torch.stack([thing.picture for thing in make_things()])
    latents = Colours(pictures).encode(pictures)
    assert latents.mean((0, 2, 3)).abs().max() < 1e-4
    deviations = latents.std((0, 2, 3))
    assert deviations[0] == pytest.approx(1, abs=1e-3)
    assert deviations.max() < 1 + 1e-3


def test_captions_are_mostly_names_and_now_and_then_nothing() -> None:
    thing, rng = make_thing("ship", torch.zeros(3, 32, 32), "boat", "sea"), random.Random(0)
    made = Counter(captions.caption(thing, rng) for _ in range(4000))
    assert made[""] / 4000 == pytest.approx(0.08, abs=0.02)
    assert (made["ship"] + made["cute ship"]) / 4000 == pytest.approx(0.60, abs=0.03)
    assert {word for text in made for word in text.split()} == {"ship", "cute", "boat", "sea"}


def test_ways_of_asking_are_read_as_the_name_alone() -> None:
    tokenizer = captions.train_tokenizer(make_things(), size=200)
    texts = [
        "red apple",
        "A photo of a Red Apple",
        "please draw me a picture of the red apple!",
        "green apple",
    ]
    plain, *asked, other = captions.ids_of(tokenizer, texts).tolist()
    assert asked == [plain, plain]
    assert other != plain
    assert len(plain) == LENGTH


def test_nearest_finds_each_picture_through_noise_and_not_another() -> None:
    pictures = torch.stack([thing.picture for thing in make_things()])
    noisy = pictures + 0.3 * torch.randn(pictures.shape, generator=torch.Generator().manual_seed(2))
    assert check.nearest(noisy, pictures) == [0, 1, 2]
    assert check.nearest(noisy.flip(0), pictures) == [2, 1, 0]


def test_a_name_with_the_same_picture_counts_and_one_with_another_does_not() -> None:
    apple, green, _ = make_things()
    assert check.looks_like(make_thing("pomme rouge", apple.picture.clone()), apple)
    assert not check.looks_like(green, apple)
