"""Text to phonemes: every word is spoken, in order, in bounded time."""

from __future__ import annotations

import json
import time
from functools import cache
from importlib.resources import files

import pytest

from omni_async.stages.models.hibari.phonemes import MAX_PHONEMES, Phonemizer, cut, loosen

WORDS = [
    "several",
    "quiet",
    "people",
    "carried",
    "heavy",
    "boxes",
    "through",
    "green",
    "doors",
    "before",
    "seven",
    "o'clock",
]


@cache
def phonemizer() -> Phonemizer:
    return Phonemizer()


def sentences(text: str) -> list[list[int]]:
    return list(phonemizer().sentences(text))


@cache
def alphabet() -> dict[int, str]:
    """Phonemes by id."""
    vocabulary: dict[str, int] = json.loads((files("hibari") / "assets" / "vocab.json").read_text("utf-8"))
    return {number: phoneme for phoneme, number in vocabulary.items()}


def phonemes(text: str) -> str:
    """Of all sentences, without padding, stress and what only separates words."""
    spoken = "".join(alphabet().get(i, "") for ids in sentences(text) for i in ids if i)
    return "".join(ch for ch in spoken if ch.isalpha() and ch not in "ˈˌ")


def test_a_sentence_is_padded_and_has_the_packages_ids() -> None:
    from hibari import Hibari

    package = Hibari(threads=1)
    text = "Dr. Smith paid $9.99 at 7:30 pm, didn't he? Yes! On the 3rd of March 2024."
    assert sentences(text) == [package.ids(ps) for ps in package.phonemize(text)]


def test_a_long_sentence_with_clauses_is_split_as_the_package_splits_it() -> None:
    from hibari import Hibari

    package = Hibari(threads=1)
    text = ", ".join(" ".join(WORDS[i : i + 5]) for i in (0, 3, 6, 1, 4, 2, 5, 0, 3, 6, 1, 4, 2, 5, 0)) + "."
    assert len(sentences(text)) > 1
    assert sentences(text) == [package.ids(ps) for ps in package.phonemize(text)]


@pytest.mark.parametrize("count", [60, 700])
def test_text_without_punctuation_is_split_between_words_and_loses_none(count: int) -> None:
    words = [WORDS[i % len(WORDS)] for i in range(count)]
    found = sentences(" ".join(words))
    assert len(found) > 1
    assert all(len(ids) <= MAX_PHONEMES + 2 for ids in found)
    one_round = sum(len(phonemes(word)) for word in words)
    # A word's sound depends a little on its neighbours ("the end"), and no more.
    assert abs(len(phonemes(" ".join(words))) - one_round) < 0.03 * one_round


def test_one_endless_word_is_spoken_in_pieces() -> None:
    assert len(phonemes("la" * 5000)) > 5000


@pytest.mark.parametrize("text", ["hello 😀 world", "hello \u200b world", "**hello** world"])
def test_signs_amid_words_do_not_swallow_them(text: str) -> None:
    assert phonemes(text) == phonemes("hello world")


def test_a_sign_between_two_words_parts_them() -> None:
    assert phonemes("hello😀world").startswith("h")
    assert phonemes("hello😀world").endswith(phonemes("world"))


@pytest.mark.parametrize("text", ["", "  \n ", "😀 🎉", "... !!!", "—", "中文"])
def test_text_with_nothing_to_say_gives_no_sentence(text: str) -> None:
    assert sentences(text) == []


def test_sentences_without_sound_are_passed_over() -> None:
    assert sentences("Hello.\n😀\nWorld.") == [*sentences("Hello."), *sentences("World.")]


@pytest.mark.parametrize("digits", [1, 18, 19, 36, 37, 300])
def test_numbers_of_any_length_are_read(digits: int) -> None:
    assert len(phonemes("7" * digits)) > digits


@pytest.mark.parametrize(
    "unit", ["a-", "/", "&", "a@", "1/", "1,", "[", "(", ".", "'", "aA1_", "[a](", "$1", "😀"]
)
def test_no_text_makes_the_look_up_explode(unit: str) -> None:
    began = time.process_time()
    sentences(unit * (1200 // len(unit)))
    assert time.process_time() - began < 4


def test_phonemes_are_looked_up_one_sentence_at_a_time() -> None:
    began = time.process_time()
    first = next(phonemizer().sentences("This is a sentence of some words. " * 3000))
    assert first == sentences("This is a sentence of some words.")[0]
    assert time.process_time() - began < 1


def test_loosening_leaves_ordinary_text_alone_and_loses_no_character() -> None:
    ordinary = "Visit https://example.com/a/b?c=1, or e-mail me@example.org: it's 3,000.50 $!"
    assert loosen(ordinary) == ordinary
    odd = "a-" * 100 + " " + "7" * 50 + "x" * 100
    assert loosen(odd).replace(" ", "") == odd.replace(" ", "")
    assert loosen(odd) != odd


def test_pieces_end_after_clauses_or_between_words() -> None:
    assert cut("one two, three four five", 14) == ["one two,", "three four", "five"]
    assert cut("abcdefgh", 3) == ["abc", "def", "gh"]
    assert " ".join(cut(" ".join(WORDS), 20)) == " ".join(WORDS)
