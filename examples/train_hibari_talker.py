"""Train the sampled talker of the built-in voice anew (ten minutes on one core, no downloads).

    python examples/train_hibari_talker.py --minutes 10 --output talker.safetensors

The network learns to speak as the deterministic prosody of `hibari-tts` does: made-up sentences go
through the package's own graph, and of each the timing, pitch and energy are what is to be predicted,
step by step. Sampled at a temperature, it then varies around that. The result belongs at
`stages/models/hibari/weights/talker.safetensors`; its licence and figures are in MODEL_CARD.md there.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from omni_async.stages.models.hibari.autoregressive import (
    CODES,
    GROUPS,
    LONGEST_PHONEME,
    START,
    Autoregressive,
    encode_energy,
    encode_pitch,
    with_neighbours,
)
from omni_async.stages.models.hibari.package_model import load_graph, model_path
from omni_async.stages.models.hibari.phonemes import Phonemizer
from omni_async.stages.models.hibari.prosody import Prosody

BATCH = 8
HELD_OUT = 48
PEAK_RATE = 1.5e-3
TIMING_WEIGHT = 2.0

WHO = "the teacher|my sister|our neighbour|an old captain|the young doctor|a baker|their cousin|Peter|Maria|"
WHO += (
    "the engineer|a famous singer|two students|the children|nobody|everyone in town|the night nurse|I|you|we"
)
DID = "found|carried|painted|opened|closed|bought|sold|forgot|remembered|cleaned|repaired|borrowed|measured|"
DID += (
    "described|watched|moved|washed|lifted|dropped|wrapped|photographed|ordered|counted|returned|kept|chose"
)
WHAT = "the red bicycle|a bag of apples|that heavy door|three silver coins|an old map|the garden gate|"
WHAT += "a box of matches|fresh milk|the broken window|her winter coat|yellow flowers|the last train ticket|"
WHAT += (
    "the green umbrella|his grandfather's watch|leather boots|this evening's newspaper|strong black coffee|"
)
WHAT += "seven bright candles|a small brown dog|the jar of honey|every single page|the rusty key|enough rope"
WHERE = "in the market square|near the river|behind the church|at the station|on the hill|by the harbour|"
WHERE += "under the bridge|at home|outside the city|across the street|before breakfast|after a short walk|"
WHERE += (
    "during the storm|on Monday morning|at half past nine|without a word|with great care|for no good reason"
)
THEN = "and|but|because|so|while|although|until|before|after|when|since|unless"
FIRST = (
    "Yesterday|In the end|To my surprise|Once again|Of course|For example|Last summer|If you ask me|As usual"
)
ASK = "Where did you put|Have you seen|Who took|Why did nobody mention|How much did they pay for|Did we touch"
BID = "Please bring|Do not forget|Remember to check|Take good care of|Never sell|Try to find|Tell me about"
FACT = "the weather will be warm and sunny|nothing is as simple as it seems|the price of bread has gone up|"
FACT += (
    "the lights went out just before dinner|good tools make hard work pleasant|every answer asks a question|"
)
FACT += "the road climbs slowly through thick forest|she speaks four languages|most birds had flown away|"
FACT += "rain filled the quiet street|his voice was thin and strange|the ship turned south|it costs one fifty"


def pick(words: str) -> str:
    """One of the alternatives."""
    return random.choice(words.split("|"))


def make_clause() -> str:
    """A subject that did something, or a statement."""
    if random.random() < 0.25:
        return pick(FACT)
    place = f" {pick(WHERE)}" if random.random() < 0.6 else ""
    return f"{pick(WHO)} {pick(DID)} {pick(WHAT)}{place}"


def make_sentence() -> str:
    """A statement, a compound, a question, a request or an exclamation."""
    shapes = (
        lambda: f"{make_clause()}.",
        lambda: f"{make_clause()}.",
        lambda: f"{make_clause()} {pick(THEN)} {make_clause()}.",
        lambda: f"{make_clause()}, {pick(THEN)} {make_clause()}; {make_clause()}.",
        lambda: f"{pick(FIRST)}, {make_clause()}.",
        lambda: f"{pick(ASK)} {pick(WHAT)}?",
        lambda: f"{pick(BID)} {pick(WHAT)} {pick(WHERE)}.",
        lambda: f"{pick(WHAT)} and {pick(WHAT)}!",
    )
    sentence = random.choice(shapes)()
    return sentence[0].upper() + sentence[1:]


@dataclass(frozen=True, slots=True)
class Example:
    """A sentence of L phonemes in T steps: encoder vectors [L, 576]; per step the phoneme [T], the steps
    spent on it [T], the codes [T, 4] and whether it is the phoneme's last [T]."""

    text: Tensor
    phoneme: Tensor
    elapsed: Tensor
    codes: Tensor
    ends: Tensor


def make_example(prosody: Prosody, ids: Sequence[int]) -> Example:
    """What the package says of one sentence."""
    encoded, frames = prosody.encode(ids), prosody.speak(ids, 1.0)
    units = encoded.units.astype(np.int64)
    pitch = encode_pitch(frames.pitch.reshape(-1, 2))
    energy = encode_energy((frames.values[:, -1] * 5).reshape(-1, 2))
    elapsed = np.concatenate([np.arange(count) for count in units])
    phoneme = np.repeat(np.arange(len(units)), units)
    return Example(
        text=torch.from_numpy(with_neighbours(encoded.text)),
        phoneme=torch.from_numpy(phoneme),
        elapsed=torch.from_numpy(np.minimum(elapsed, LONGEST_PHONEME - 1)),
        codes=torch.from_numpy(np.concatenate([pitch, energy], 1)),
        ends=torch.from_numpy((elapsed == units[phoneme] - 1).astype(np.float32)),
    )


def make_examples(count: int) -> list[Example]:
    """Distinct sentences with what the package says of them."""
    prosody, phonemizer = Prosody(load_graph(model_path()), "cpu"), Phonemizer()
    sentences = sorted({make_sentence() for _ in range(2 * count)})
    random.shuffle(sentences)
    return [make_example(prosody, ids) for text in sentences[:count] for ids in phonemizer.sentences(text)]


def disturb(codes: Tensor) -> Tensor:
    """The codes of the steps before, [B, T, 4], now and then wrong or missing: when sampling, they will
    be the network's own."""
    wrong = torch.rand(codes.shape[:2]) < 0.3
    jitter = (torch.randn(codes.shape) * 1.5).round().long()
    moved = torch.where(codes > 0, (codes + jitter).clamp(1, CODES - 1), codes)
    codes = torch.where(wrong[..., None] & (codes != START), moved, codes)
    missing = torch.rand(codes.shape[:2]) < 0.1
    return torch.where(missing[..., None], torch.full_like(codes, START), codes)


def losses(net: Autoregressive, batch: Sequence[Example], *, disturbed: bool) -> tuple[Tensor, Tensor]:
    """Mean cross-entropies of timing and of codes."""
    codes = pad_sequence([example.codes for example in batch], batch_first=True)
    ends = pad_sequence([example.ends for example in batch], batch_first=True)
    elapsed = pad_sequence([example.elapsed for example in batch], batch_first=True)
    text = pad_sequence([example.text[example.phoneme] for example in batch], batch_first=True)
    valid = pad_sequence([torch.ones(len(example.ends)) for example in batch], batch_first=True)
    previous = functional.pad(codes[:, :-1], (0, 0, 1, 0), value=START)
    moving, logits = net(text, elapsed, disturb(previous) if disturbed else previous)
    timing = functional.binary_cross_entropy_with_logits(moving, ends, reduction="none")
    saying = functional.cross_entropy(logits.flatten(0, 2), codes.flatten(), reduction="none")
    saying = saying.view(-1, GROUPS).mean(1).view_as(valid)
    return (timing * valid).sum() / valid.sum(), (saying * valid).sum() / valid.sum()


def train(net: Autoregressive, examples: Sequence[Example], minutes: float) -> None:
    """Train for `minutes`, with a cosine schedule over the time."""
    held_out, kept = examples[:HELD_OUT], examples[HELD_OUT:]
    optimizer = torch.optim.AdamW(net.parameters(), PEAK_RATE, weight_decay=0.01)
    report(net, held_out, 0, 0.0)
    began, step = time.monotonic(), 0
    while (done := (time.monotonic() - began) / (60 * minutes)) < 1:
        rate = PEAK_RATE * min(1, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        timing, saying = losses(net, random.sample(kept, BATCH), disturbed=True)
        optimizer.zero_grad()
        (TIMING_WEIGHT * timing + saying).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            report(net, held_out, step, done)
    report(net, held_out, step, 1.0)


@torch.no_grad()
def report(net: Autoregressive, held_out: Sequence[Example], step: int, done: float) -> None:
    """One line: how well sentences are predicted that were not trained on."""
    timing, saying = losses(net, held_out, disturbed=False)
    print(f"{done:4.0%} step {step}: held-out timing {timing:.4f}, codes {saying:.3f}", flush=True)


def main() -> None:
    """Make the examples, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sentences", type=int, default=4000)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    examples = make_examples(args.sentences)
    print(
        f"{len(examples)} sentences, {sum(len(e.ends) for e in examples) * 0.025 / 60:.0f} minutes of speech"
    )
    net = Autoregressive().train()
    train(net, examples, args.minutes)
    save_file({name: tensor.contiguous() for name, tensor in net.state_dict().items()}, args.output)


if __name__ == "__main__":
    main()
