from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.api.config import ApiConfig
from omni_async.api.session_messages import ErrorEvent, SessionConfig, SessionCreated
from omni_async.api.speech_session import Action, Close, Send, Silence, Speak, SpeechSession
from omni_async.errors import DeadlineExceeded, InvalidRequest, Overloaded, StageFailed

CREATED = SessionCreated(session_id="s", sample_rate=24000, format="pcm")
CONFIG = ApiConfig(ws_config_timeout=10, ws_idle_timeout=30, max_input_chars=1000, ws_max_message_bytes=5000)


def open_session(fields: SessionConfig) -> SessionCreated:
    if fields.voice == "nobody":
        raise InvalidRequest("Unknown voice.", param="voice")
    return CREATED


class Talk:
    """A session under test, whose invariants are checked after each step; time is a number."""

    def __init__(self, *, configured: bool = True) -> None:
        self.now = 100.0
        self.session = SpeechSession(CONFIG, open_session, self.now)
        if configured:
            assert self.say(type="session.config") == [Send(CREATED)]

    def say(self, **message: Any) -> list[Action]:
        return self.send(json.dumps(message))

    def send(self, data: str) -> list[Action]:
        actions = self.session.receive_text(data, self.now)
        self.session.check()
        while self.session.unread:
            actions += self.session.read_on()
            self.session.check()
        return actions

    def end(self, index: int, error: Exception | None = None) -> list[Action]:
        actions = self.session.sentence_ended(index, self.now, error)
        self.session.check()
        return actions


def error_of(actions: list[Action]) -> ErrorEvent:
    (action,) = actions
    assert isinstance(action, Send)
    assert isinstance(action.event, ErrorEvent)
    return action.event


def kinds(actions: list[Action]) -> list[str]:
    return [type(a.event).__name__ if isinstance(a, Send) else type(a).__name__ for a in actions]


def test_sentences_are_spoken_as_they_are_completed_and_the_rest_at_the_end() -> None:
    talk = Talk()
    assert talk.say(type="input.text", text="Hello the") == []
    assert talk.say(type="input.text", text="re. How are you? I") == [
        Speak(0, "Hello there."),
        Speak(1, "How are you?"),
    ]
    assert talk.say(type="input.done") == [Speak(2, "I")]
    assert talk.end(0) == talk.end(1) == []
    assert kinds(talk.end(2)) == ["SessionDone", "Close"]
    assert talk.session.closed


def test_a_flush_ends_an_utterance_and_the_next_goes_on_counting() -> None:
    talk = Talk()
    assert talk.say(type="input.text", text="One") == []
    assert talk.say(type="input.flush") == [Speak(0, "One")]
    assert talk.say(type="input.text", text="Two") == []
    assert talk.say(type="input.flush") == [Speak(1, "Two")]
    assert talk.say(type="input.flush") == []


def test_done_without_text_ends_the_session() -> None:
    actions = Talk().say(type="input.done")
    assert kinds(actions) == ["SessionDone", "Close"]
    assert actions[-1] == Close(1000)


def test_a_cancel_forgets_everything_and_the_session_goes_on() -> None:
    talk = Talk()
    talk.say(type="input.text", text="One. Two. Thr")
    assert talk.say(type="input.cancel") == [Silence()]
    assert talk.end(0) == [], "a late end of a cancelled sentence is ignored"
    assert talk.say(type="input.text", text="Four. ") == []
    assert talk.say(type="input.flush") == [Speak(2, "Four.")]


def test_a_cancel_after_done_ends_the_session() -> None:
    talk = Talk()
    talk.say(type="input.text", text="One. Two. Three.")
    talk.say(type="input.done")
    assert kinds(talk.say(type="input.cancel")) == ["Silence", "SessionDone", "Close"]


@pytest.mark.parametrize("text", ["😀", "...", " \n ", "?!"])
def test_text_with_nothing_to_speak_is_an_error_and_the_session_stays(text: str) -> None:
    talk = Talk()
    talk.say(type="input.text", text=text)
    error = error_of(talk.say(type="input.flush"))
    assert (error.code, error.param) == ("nothing_to_speak", "text")
    talk.say(type="input.text", text="Fine.")
    assert talk.say(type="input.flush") == [Speak(0, "Fine.")]


def test_white_space_after_the_last_sentence_is_no_error() -> None:
    talk = Talk()
    talk.say(type="input.text", text="Fine. Yes.")
    talk.say(type="input.flush")
    talk.say(type="input.text", text="One.\n\nTwo.\n")
    assert talk.say(type="input.flush") == [Speak(3, "Two.")]
    talk.say(type="input.text", text="More of it! \n")
    assert talk.say(type="input.flush") == [Speak(4, "More of it!")]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ('{"type": "input.text"}', "text"),
        ('{"type": "input.text", "text": 5}', "text"),
        ('{"type": "input.text", "text": "a", "more": 1}', "more"),
        ('{"type": "input.speak"}', "type"),
        ("{}", "type"),
        ('{"type": "ping", "id": 1}', "id"),
        ("[]", None),
        ("not json", None),
    ],
)
def test_a_wrong_message_is_an_error_event_and_changes_nothing(message: str, param: str | None) -> None:
    talk = Talk()
    talk.say(type="input.text", text="One")
    assert error_of(talk.send(message)).param == param
    assert talk.say(type="input.flush") == [Speak(0, "One")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"voice": "nobody"}, "voice"),
        ({"speed": 9}, "speed"),
        ({"input": "a"}, "input"),
        ({"stream": True}, "stream"),
        ({"split_granularity": "word"}, "split_granularity"),
        ({"response_format": "ogg"}, "response_format"),
        ({"sample_rate": 1}, "sample_rate"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_wrong_configuration_can_be_corrected(fields: dict[str, Any], param: str) -> None:
    talk = Talk(configured=False)
    assert error_of(talk.say(type="session.config", **fields)).param == param
    assert talk.say(type="session.config", voice=None) == [Send(CREATED)]
    assert error_of(talk.say(type="session.config")).code == "already_configured"


def test_input_before_the_configuration_or_after_the_end_is_an_error() -> None:
    talk = Talk(configured=False)
    for kind in ("input.flush", "input.cancel", "input.done"):
        assert error_of(talk.say(type=kind)).code == "not_configured"
    talk = Talk()
    talk.say(type="input.text", text="One")
    talk.say(type="input.done")
    for message in ({"type": "input.text", "text": "a"}, {"type": "input.done"}, {"type": "input.flush"}):
        assert error_of(talk.say(**message)).code == "input_done"


def test_ping_is_answered_at_any_time() -> None:
    talk = Talk(configured=False)
    assert kinds(talk.say(type="ping")) == ["Pong"]
    talk.say(type="session.config")
    talk.say(type="input.text", text="One. Two. ")
    assert kinds(talk.say(type="ping")) == ["Pong"]


def test_limits_close_the_session_with_1009() -> None:
    talk = Talk()
    assert talk.send('{"type": "input.text", "text": "' + "é" * 2500 + '"}')[-1] == Close(1009)
    talk = Talk()
    talk.say(type="input.text", text="x" * 600)
    assert kinds(talk.say(type="input.text", text="x" * 401)) == ["Silence", "ErrorEvent", "Close"]
    assert talk.session.closed


def test_a_binary_frame_closes_the_session_with_1003() -> None:
    assert Talk().session.receive_binary()[-1] == Close(1003)


def test_time_runs_while_the_session_is_silent_only() -> None:
    talk = Talk(configured=False)
    assert talk.session.deadline == 110
    talk.now = 105
    talk.say(type="ping")
    assert talk.session.deadline == 110, "only a configuration stops this clock"
    talk.say(type="session.config")
    assert talk.session.deadline == 135
    talk.say(type="input.text", text="One. Two")
    assert talk.session.deadline is None
    talk.now = 200
    talk.end(0)
    assert talk.session.deadline == 230
    assert talk.session.time_out()[-1] == Close(1008)


@pytest.mark.parametrize(
    ("error", "code"), [(StageFailed("x"), 1011), (Overloaded("x"), 1013), (OSError(), 1011)]
)
def test_a_failed_stage_closes_the_session(error: Exception, code: int) -> None:
    talk = Talk()
    talk.say(type="input.text", text="One. Two. Three")
    actions = talk.end(0, error)
    assert kinds(actions) == ["Silence", "ErrorEvent", "Close"]
    assert actions[-1] == Close(code)
    assert talk.end(1) == []


def test_a_passed_deadline_fails_its_sentence_alone() -> None:
    talk = Talk()
    talk.say(type="input.text", text="One. Two. Three")
    assert error_of(talk.end(0, DeadlineExceeded("late"))).code == "deadline_exceeded"
    assert talk.say(type="input.flush") == [Speak(2, "Three")]


STEPS = st.one_of(
    st.sampled_from(["input.flush", "input.cancel", "input.done", "ping", "session.config"]),
    st.sampled_from(["One. ", "Two", "😀 ", "x" * 90, "\n\n"]).map(lambda text: ("input.text", text)),
    st.integers(0, 6),
)


@given(st.lists(STEPS, max_size=40))
def test_any_order_of_messages_keeps_the_invariants(steps: list[Any]) -> None:
    talk = Talk(configured=False)
    spoken: list[int] = []
    for step in steps:
        if talk.session.closed:
            break
        if isinstance(step, int):
            actions = talk.end(step)
        elif isinstance(step, tuple):
            actions = talk.say(type=step[0], text=step[1])
        else:
            actions = talk.say(type=step)
        spoken += [action.index for action in actions if isinstance(action, Speak)]
        assert talk.session.closed == any(isinstance(action, Close) for action in actions)
    assert spoken == list(range(len(spoken)))
