from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.api.sentence_splitter import Granularity, SentenceSplitter

GRANULARITIES = st.sampled_from(["sentence", "clause", "none"])
# Letters are few so that marks, quotes and spaces meet often.
_PIECES = [*"aB1.!?…,;:\"')」。、！ \n😀\u0301", "Mr", "e.g", "No"]
TEXTS = st.lists(st.sampled_from(_PIECES), max_size=200).map("".join)


def split(text: str, granularity: Granularity = "sentence", max_chars: int = 400) -> list[str]:
    splitter = SentenceSplitter(granularity, max_chars)
    return [*splitter.push(text), *splitter.flush()]


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("Mr. Smith met Dr. Jones. They left.", ["Mr. Smith met Dr. Jones.", "They left."]),
        ("It costs 3.5 dollars. Cheap.", ["It costs 3.5 dollars.", "Cheap."]),
        ("Fruit, e.g. apples. Or i.e. pears.", ["Fruit, e.g. apples.", "Or i.e. pears."]),
        ("See https://a.org/b?c=d.e for it. Bye.", ["See https://a.org/b?c=d.e for it.", "Bye."]),
        ("Write to a.b@c.org. Thanks.", ["Write to a.b@c.org.", "Thanks."]),
        ("你好。今天很好！「是的。」我走了。", ["你好。", "今天很好！", "「是的。」", "我走了。"]),
        ('"Really?" she said. "Yes."', ['"Really?" she said.', '"Yes."']),
        ("Well... maybe. So", ["Well... maybe.", "So"]),
        ("J. R. Tolkien wrote. We read.", ["J. R. Tolkien wrote.", "We read."]),
        ("So am I. You too.", ["So am I.", "You too."]),
        ("No. 5 is alive. No. It is not.", ["No. 5 is alive.", "No.", "It is not."]),
        ("Tea, milk, etc. and more. Done.", ["Tea, milk, etc. and more.", "Done."]),
        ("1. Apples. 2. Pears.", ["1. Apples.", "2. Pears."]),
        ("It was in 2024. Then not.", ["It was in 2024.", "Then not."]),
        ("A title\n\nA paragraph", ["A title", "A paragraph"]),
        ("a hard\nwrapped line", ["a hard\nwrapped line"]),
        ("Wow!!! 😀 Next one. 😀", ["Wow!!!", "😀 Next one.", "😀"]),
    ],
)
def test_text_is_cut_into_sentences(text: str, sentences: list[str]) -> None:
    assert [segment.strip() for segment in split(text)] == sentences


def test_clauses_end_at_commas_but_not_within_numbers() -> None:
    parts = split("First, 1,000 of them; then: one. 你好，朋友。", "clause")
    assert [part.strip() for part in parts] == [
        "First,",
        "1,000 of them;",
        "then:",
        "one.",
        "你好，",
        "朋友。",
    ]


def test_without_granularity_everything_waits_for_the_flush() -> None:
    splitter = SentenceSplitter("none")
    assert splitter.push("One. Two. ") == []
    assert splitter.push("Three." * 200) == []
    assert splitter.flush() == ["One. Two. " + "Three." * 200]


def test_a_sentence_is_given_out_as_soon_as_the_next_word_begins() -> None:
    splitter = SentenceSplitter()
    assert splitter.push("Hello there.") == []
    assert splitter.push(" ") == []
    assert splitter.push("N") == ["Hello there. "]


def test_text_without_punctuation_is_cut_between_words() -> None:
    parts = split("word " * 300, max_chars=100)
    assert "".join(parts) == "word " * 300
    assert all(len(part) <= 100 and part.endswith("word ") for part in parts)


def test_text_without_spaces_is_cut_at_the_limit() -> None:
    assert [len(part) for part in split("x" * 250, max_chars=100)] == [100, 100, 50]


@given(TEXTS, GRANULARITIES, st.integers(1, 60))
def test_nothing_is_lost_and_no_segment_is_too_long(text: str, granularity: Granularity, limit: int) -> None:
    parts = split(text, granularity, limit)
    assert "".join(parts) == text
    assert granularity == "none" or all(0 < len(part) <= limit for part in parts)


@settings(max_examples=300)
@given(TEXTS, GRANULARITIES, st.integers(1, 60), st.lists(st.integers(0, 200)))
def test_the_cuts_do_not_depend_on_how_the_text_was_divided(
    text: str, granularity: Granularity, limit: int, places: list[int]
) -> None:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    splitter = SentenceSplitter(granularity, limit)
    parts: list[str] = []
    for start, end in pairwise(edges):
        parts += splitter.push(text[start:end])
    assert [*parts, *splitter.flush()] == split(text, granularity, limit)


@pytest.mark.parametrize("unit", ["a. ", ".", ". ", " ", "x", "\n", "\".'", "。", "1. ", "(. ", "a,b "])
def test_time_is_linear_in_crafted_text(unit: str) -> None:
    def seconds(length: int) -> float:
        text = unit * (length // len(unit))
        began = time.process_time()
        split(text, "clause")
        return time.process_time() - began

    split(unit * 1000, "clause")
    # Quadratic time would be 64 times as long; the absolute floor keeps timer noise out.
    assert seconds(160_000) < 24 * max(seconds(20_000), 0.004)
