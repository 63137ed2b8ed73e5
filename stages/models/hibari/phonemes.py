"""Text → sentences → phoneme ids. Nothing is lost: what is too long for the model is cut and spoken on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.resources import files
from typing import Any

g2p: Any = import_module("hibari.g2p")  # the package has no types
tts: Any = import_module("hibari.tts")
MAX_PHONEMES: int = tts.MAX_PHONEMES

MAX_CHARS = 600
"""A longer sentence is cut before its phonemes are looked up: it keeps that look-up short and linear."""

LONGEST_RUN, MOST_ATOMS, MOST_DIGITS = 48, 24, 18
"""Of what stands between two spaces: characters, words and signs, digits in a row. The package's look-up
takes time by the cube of the atoms (minutes for 600 characters of "a-") and knows no word for larger
numbers; what has more gets a space in between."""

_RUN = re.compile(rf"\S{{{MOST_ATOMS},}}")
_DIGITS = re.compile(rf"\d{{{MOST_DIGITS}}}(?=\d)")
_ATOM = re.compile(rf"[^\W\d_]{{1,{LONGEST_RUN}}}|\d+|.")
_CLAUSE = re.compile(r"(?<=[,;:—])\s+")


class Phonemizer:
    """English text to phoneme ids. Not safe for several threads."""

    def __init__(self) -> None:
        self._g2p = g2p.G2P(british=False)
        self._ids = _vocabulary()

    def sentences(self, text: str) -> Iterator[list[int]]:
        """The ids of one sentence after the other, made when asked for, padded with 0 at both ends.

        Sentences without anything to say are passed over.
        """
        sentences: list[str] = tts.Hibari.split_sentences(text)
        for sentence in sentences:
            for piece in cut(loosen(" ".join(sentence.split())), MAX_CHARS):
                for phonemes in _fit(self._g2p(piece) or ""):
                    if any(map(str.isalpha, phonemes)):
                        yield [0, *(self._ids[ch] for ch in phonemes if ch in self._ids), 0]


def _fit(phonemes: str) -> list[str]:
    """As many parts as the model's limit asks for: at clauses as the package does, then at words."""
    if len(phonemes) <= MAX_PHONEMES:
        return [phonemes]
    parts: list[str] = []
    for clause in _CLAUSE.split(phonemes):
        if parts and len(parts[-1]) + len(clause) < MAX_PHONEMES:
            parts[-1] = f"{parts[-1]} {clause}"
        else:
            parts += cut(clause, MAX_PHONEMES)
    return parts


def cut(text: str, limit: int) -> list[str]:
    """`text` in pieces of at most `limit` characters: after a clause, else between words, else anywhere."""
    pieces: list[str] = []
    start = 0
    while len(text) - start > limit:
        window = text[start : start + limit]
        at = max(window.rfind(", "), window.rfind("; "), window.rfind(": "))
        if at < limit // 2:
            at = window.rfind(" ")
        end = at + 1 if at > 0 else limit
        pieces.append(text[start : start + end].strip())
        start += end
    return [piece for piece in (*pieces, text[start:].strip()) if piece]


def loosen(text: str) -> str:
    """`text` with spaces within runs of characters that would take the look-up too long."""
    return _RUN.sub(lambda run: _loosen_run(run[0]), _DIGITS.sub(r"\g<0> ", text))


def _loosen_run(run: str) -> str:
    parts, atoms = [""], 0
    for atom in _ATOM.findall(run):
        if atoms == MOST_ATOMS or len(parts[-1]) + len(atom) > LONGEST_RUN:
            parts.append("")
            atoms = 0
        parts[-1] += atom
        atoms += 1
    return " ".join(parts)


def _vocabulary() -> dict[str, int]:
    return json.loads((files("hibari") / "assets" / "vocab.json").read_text(encoding="utf-8"))
