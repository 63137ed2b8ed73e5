"""Cuts text into sentences while it is still being typed.

Nothing is lost: the segments joined are the text. The cuts depend on the text alone, never on how it was
divided into pieces, because a cut is made only when the characters that decide it are there. Time is
linear in the text, whatever it holds.
"""

from __future__ import annotations

import re
from typing import Literal

Granularity = Literal["sentence", "clause", "none"]

_CJK_ENDS = "。！？｡"
_CJK_CLAUSES = "，、；："
_ENDS = ".!?…"
_CLAUSES = ",;:—"
_CLOSERS = "\"'”’»)]}」』）】》〉"
# Never the end of a sentence: what they abbreviate goes on. Where that is not certain (U.S.), a missed
# cut costs a little time, and a wrong one is heard.
_NEVER = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "mx",
        "dr",
        "prof",
        "rev",
        "hon",
        "st",
        "sr",
        "jr",
        "gen",
        "col",
        "lt",
        "sgt",
        "capt",
        "cmdr",
        "gov",
        "sen",
        "rep",
        "pres",
        "messrs",
        "mme",
        "mlle",
        "e.g",
        "i.e",
        "eg",
        "ie",
        "vs",
        "cf",
        "al",
        "viz",
        "approx",
        "ca",
        "dept",
        "est",
        "resp",
        "incl",
        "excl",
        "u.s",
        "u.k",
        "u.n",
        "d.c",
        "ph.d",
        "b.a",
        "m.a",
    ]
)
# The end of a sentence unless a lower-case word follows, or a number.
_UNLESS_LOWER = frozenset(["etc", "inc", "ltd", "co", "corp", "bros", "a.m", "p.m", "ave", "blvd"])
_UNLESS_NUMBER = frozenset(["no", "nos", "fig", "figs", "vol", "p", "pp", "sec", "ch", "art", "eq"])
_WORD_BEFORE = re.compile(r"[\w.]*\Z")
_SPEAKABLE = re.compile(r"[^\W_]")
_SPACES = re.compile(r"\s*")
_LOOK_BACK = 16


class SentenceSplitter:
    """`push` pieces of text, `flush` at the end of an utterance; both answer with complete segments.

    A segment is at most `max_chars` long; without punctuation it ends between words, or, when there is
    no space either, anywhere. "none" holds everything until `flush`.
    """

    def __init__(self, granularity: Granularity = "sentence", max_chars: int = 400) -> None:
        self._whole = granularity == "none"
        self._max = max_chars
        self._soft = _CLAUSES + _CJK_CLAUSES if granularity == "clause" else ""
        self._instant = _CJK_ENDS + (_CJK_CLAUSES if self._soft else "")
        marks = re.escape(_ENDS + _CJK_ENDS + self._soft)
        self._mark = re.compile(f"[{marks}\n]")
        self._tail = re.compile(f"[{marks}{re.escape(_CLOSERS)}]*")
        self._held: list[str] = []
        self._text = ""
        self._begin_at(0)

    def _begin_at(self, start: int) -> None:
        # Positions in `_text`: where the segment starts, how far it is read, where the mark that may end
        # it lies, where the run of marks and closing quotes ends, and how far letters were looked for.
        self._start = self._at = self._spoken_to = start
        self._mark_at: int | None = None
        self._tail_end: int | None = None
        self._speaks = False

    @property
    def pending(self) -> bool:
        """Whether any text is held back."""
        return bool(self._text or self._held)

    def push(self, piece: str) -> list[str]:
        """The segments that `piece` completes."""
        if self._whole:
            self._held.append(piece)
            return []
        self._text += piece
        segments: list[str] = []
        while (cut := self._next_cut()) is not None:
            segments.append(self._text[self._start : cut])
            self._begin_at(cut)
        self._drop_cut_text()
        return segments

    def flush(self) -> list[str]:
        """The segment that is held back, if any."""
        rest = "".join(self._held) + self._text
        self._held.clear()
        self._text = ""
        self._begin_at(0)
        return [rest] if rest else []

    def _drop_cut_text(self) -> None:
        cut = self._start
        self._text = self._text[cut:]
        self._start = 0
        self._at -= cut
        self._spoken_to -= cut
        self._mark_at = None if self._mark_at is None else self._mark_at - cut
        self._tail_end = None if self._tail_end is None else self._tail_end - cut

    def _next_cut(self) -> int | None:
        full = self._start + self._max
        limit = min(len(self._text), full)
        while self._at < limit:
            if self._mark_at is None:
                self._seek_mark(limit)
            elif self._tail_end is None:
                self._seek_tail_end(limit)
            elif (cut := self._seek_word(limit, self._mark_at, self._tail_end)) is not None:
                return cut
        return self._forced_cut(full) if len(self._text) > full else None

    def _seek_mark(self, limit: int) -> None:
        found = self._mark.search(self._text, self._at, limit)
        if found is None:
            self._at = limit
        elif found.group() == "\n":
            self._at = self._mark_at = self._tail_end = found.start()
        else:
            self._mark_at, self._at = found.span()

    def _seek_tail_end(self, limit: int) -> None:
        found = self._tail.match(self._text, self._at, limit)
        assert found is not None
        self._at = found.end()
        if self._at < limit:
            self._tail_end = self._at

    def _seek_word(self, limit: int, mark_at: int, tail_end: int) -> int | None:
        """Where the word after the marks and white space starts, if the text is to be cut there."""
        found = _SPACES.match(self._text, self._at, limit)
        assert found is not None
        self._at = word_at = found.end()
        if word_at == limit:
            return None
        self._mark_at = self._tail_end = None
        cuts = self._ends_between(mark_at, tail_end, word_at) and self._speaks_before(word_at)
        return word_at if cuts else None

    def _ends_between(self, mark_at: int, tail_end: int, word_at: int) -> bool:
        text = self._text
        tail = text[mark_at:tail_end]
        if text.count("\n", tail_end, word_at) >= 2 or any(mark in self._instant for mark in tail):
            return True
        return bool(tail) and word_at > tail_end and self._marks_end(tail, mark_at, text[word_at])

    def _marks_end(self, tail: str, mark_at: int, following: str) -> bool:
        if tail[0] in self._soft:
            return True
        if following.islower() and (tail[-1] in _CLOSERS or tail.startswith(("…", ".."))):
            return False
        return tail[0] != "." or tail[1:2] == "." or self._period_ends(mark_at, following)

    def _period_ends(self, mark_at: int, following: str) -> bool:
        found = _WORD_BEFORE.search(self._text, max(self._start, mark_at - _LOOK_BACK), mark_at)
        word = found.group() if found else ""
        name = word.casefold()
        if name in _NEVER or (len(word) == 1 and word.isalpha() and word != "I"):
            return False
        if name.isdigit() and not self._text[self._start : mark_at - len(word)].strip():
            return False
        if following.islower() and name in _UNLESS_LOWER:
            return False
        return not (following.isdigit() and name in _UNLESS_NUMBER)

    def _speaks_before(self, end: int) -> bool:
        if not self._speaks:
            self._speaks = _SPEAKABLE.search(self._text, self._spoken_to, end) is not None
            self._spoken_to = end
        return self._speaks

    def _forced_cut(self, full: int) -> int:
        """The start of the last word in the first `max_chars` characters, or their end."""
        for at in range(full, self._start, -1):
            if self._text[at - 1].isspace():
                return at
        return full
