"""The draws of the `ar` kind: from the distribution that was asked for, and of a seed and a step alone."""

from __future__ import annotations

import pytest
import torch

from omni_async.stages.ar.cache import RaggedCache
from omni_async.stages.ar.sampling import Sampler, Sampling, draw

LOGITS = torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0])
DRAWS = 4000


def shares(sampling: Sampling) -> torch.Tensor:
    """How often each token is drawn, over many seeds."""
    tokens = torch.tensor([Sampler(sampling, seed).choose(LOGITS, []) for seed in range(DRAWS)])
    return torch.bincount(tokens, minlength=len(LOGITS)) / DRAWS


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    expected = (LOGITS / temperature).softmax(-1)
    torch.testing.assert_close(shares(Sampling(temperature=temperature)), expected, atol=0.03, rtol=0)


def test_what_is_cut_off_never_comes() -> None:
    assert (shares(Sampling(top_k=2)) > 0).tolist() == [False, False, True, True, False]
    assert (shares(Sampling(top_p=0.5)) > 0).tolist() == [False, False, False, True, False]
    assert (shares(Sampling(min_p=0.3)) > 0).tolist() == [False, False, True, True, False]


def test_a_penalty_counts_what_was_said_before_and_since() -> None:
    greedy = Sampling(temperature=0.0, repetition_penalty=2.0)
    assert Sampler(greedy, 0).choose(LOGITS, []) == 3
    assert Sampler(greedy, 0).choose(LOGITS, [3]) == 2
    assert Sampler(greedy, 0, before=[3]).choose(LOGITS, []) == 2


def test_noise_depends_on_seed_step_and_use_alone() -> None:
    sampler = Sampler(Sampling(), 7)
    first = sampler.noise(3, 1, (1, 8))
    sampler.choose(LOGITS, [1, 2])
    assert torch.equal(sampler.noise(3, 1, (1, 8)), first)
    other_seed = Sampler(Sampling(), 8).noise(3, 1, (1, 8))
    others = [sampler.noise(4, 1, (1, 8)), sampler.noise(3, 2, (1, 8)), other_seed]
    assert not any(torch.equal(other, first) for other in others)
    assert draw(torch.tensor([[0.0, 99.0]]), first[:, :2]).tolist() == [1]


def test_a_slot_that_grows_keeps_what_it_holds() -> None:
    cache = RaggedCache(1, 2, 1, 2, dtype=torch.float32, device="cpu", capacity=4)
    slots = [cache.take(), cache.take()]
    rows = torch.arange(6.0).reshape(1, 1, 3, 2)
    cache.view(slots[:1], [0], 3).update(rows, rows, 0)
    one = torch.full((2, 1, 1, 2), 9.0)
    view = cache.view(slots, [3, 0])
    keys, _ = view.update(one, one, 0)
    assert torch.equal(keys[0, :, :3], rows[0]) and torch.equal(keys[0, :, 3], one[0, :, 0])
    assert view.mask[:, 0, 0].tolist() == [[True] * 4, [True, False, False, False]]
    keys, _ = cache.view(slots, [4, 1]).update(one, one, 0)
    assert cache.capacity == 8 and torch.equal(keys[0, :, :3], rows[0])
    cache.give(slots[0])
    assert cache.take() == slots[0]
