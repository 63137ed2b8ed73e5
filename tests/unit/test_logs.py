"""Logs: one line a record, with the request that it belongs to."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

import pytest

from omni_async import logs

pytestmark = pytest.mark.usefixtures("restored_logging")


def record(message: str = "hello %s", *args: object, **fields: object) -> logging.LogRecord:
    """A record of the logger `omni_async.test`."""
    made = logging.LogRecord("omni_async.test", logging.INFO, "f.py", 1, message, args or ("you",), None)
    made.__dict__.update(fields)
    return made


def test_a_text_line_names_level_logger_and_message() -> None:
    line = logs.TextFormatter().format(record())
    assert line.endswith(" INFO omni_async.test hello you")


def test_a_json_line_is_one_object() -> None:
    entry = json.loads(logs.JsonFormatter().format(record("größe\n%s", 3)))
    assert isinstance(entry.pop("time"), float)
    assert entry == {"level": "info", "logger": "omni_async.test", "message": "größe\n3"}


@pytest.mark.parametrize("log_format", logs.FORMATS)
def test_a_traceback_is_not_lost(log_format: str) -> None:
    formatter = logs.JsonFormatter() if log_format == "json" else logs.TextFormatter()
    try:
        raise ZeroDivisionError("by nothing")
    except ZeroDivisionError:
        line = formatter.format(record(exc_info=sys.exc_info()))
    assert "ZeroDivisionError: by nothing" in line
    if log_format == "json":
        assert "\n" not in line


async def test_lines_carry_the_request_of_their_own_task() -> None:
    formatter = logs.JsonFormatter()

    async def work(public_id: str) -> str:
        with logs.of_request(public_id):
            await asyncio.sleep(0)
            return json.loads(formatter.format(record()))["request_id"]

    assert await asyncio.gather(work("one"), work("two")) == ["one", "two"]
    assert "request_id" not in json.loads(formatter.format(record()))


def test_a_request_given_with_the_record_is_shown_too() -> None:
    assert " omni_async.test [abc] hello you" in logs.TextFormatter().format(record(request_id="abc"))


def test_setup_writes_to_standard_error_from_the_level_on(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("json", "warning")
    logging.getLogger("omni_async.test").info("not this")
    logging.getLogger("omni_async.test").warning("but this")
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == ["but this"]
    assert (logs.current_format(), logs.current_level()) == ("json", "warning")


def test_a_second_setup_replaces_the_first_and_leaves_others_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    others = list(logging.getLogger().handlers)
    logs.setup("json", "error")
    logs.setup("text", "debug")
    logging.getLogger("omni_async.test").debug("once")
    assert capsys.readouterr().err.count("once") == 1
    assert logging.getLogger().handlers[: len(others)] == others
    assert (logs.current_format(), logs.current_level()) == ("text", "debug")


@pytest.mark.parametrize(
    ("level", "name"), [(5, "debug"), (20, "info"), (30, "warning"), (25, "warning"), (50, "error")]
)
def test_without_setup_workers_follow_the_host_programs_level(level: int, name: str) -> None:
    logging.getLogger().setLevel(level)
    assert (logs.current_format(), logs.current_level()) == ("text", name)


@pytest.mark.parametrize(("log_format", "level"), [("yaml", "info"), ("text", "loud")])
def test_unknown_names_are_refused(log_format: str, level: str) -> None:
    with pytest.raises(ValueError, match="no log format"):
        logs.setup(log_format, level)
