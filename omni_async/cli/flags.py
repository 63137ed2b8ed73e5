"""Flags made from config structs, so that every field is a flag and no flag is without a field."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
import yaml

from omni_async.config import StageConfig
from omni_async.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)
STAGE_FLAG = re.compile(r"--stage-(\d+)-([a-z0-9-]+)(?:=(.*))?", re.DOTALL)

SINGULAR = {"api_keys": "api-key"}
"""Fields that a repeated flag fills."""


def add_struct(parser: argparse.ArgumentParser, struct: type[msgspec.Struct], title: str) -> None:
    """One flag per field of `struct`, typed and with its default."""
    group = parser.add_argument_group(title)
    for field in msgspec.structs.fields(struct):
        default = field.default
        if field.name in SINGULAR:
            group.add_argument(f"--{SINGULAR[field.name]}", dest=field.name, action="append", metavar="KEY")
        elif isinstance(default, bool):
            group.add_argument(_flag(field.name), dest=field.name, action=argparse.BooleanOptionalAction)
        else:
            help_text = f"default {default}"
            group.add_argument(_flag(field.name), dest=field.name, metavar="N", help=help_text)


def to_struct(args: argparse.Namespace, struct: type[T]) -> T:
    """The struct that the flags describe. Raises `ConfigError` naming the flag at fault."""
    values = {
        field.name: value
        for field in msgspec.structs.fields(struct)
        if (value := getattr(args, field.name, None)) is not None
    }
    try:
        return msgspec.convert(values, struct, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_name_flag(str(error))) from None


def take_stage_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Split `--stage-N-FIELD VALUE` from the rest: what is left, and {N: {field: value}}.

    Values are read as YAML. Raises `ConfigError` for a field that stages do not have.
    """
    rest: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    words = iter(argv)
    for word in words:
        match = STAGE_FLAG.fullmatch(word)
        if match is None:
            rest.append(word)
            continue
        number, name, value = match.groups()
        if value is None and (value := next(words, None)) is None:
            raise ConfigError(f"{word} needs a value.")
        found.setdefault(number, {})[_stage_field(name, word)] = yaml.safe_load(value)
    return rest, found


def _stage_field(name: str, flag: str) -> str:
    known = [field.name for field in msgspec.structs.fields(StageConfig)]
    field = name.replace("-", "_")
    if field not in known:
        near = get_close_matches(field, known, 1)
        raise ConfigError(f"{flag}: stages have no such field{_hint(near)}.")
    return field


def read_overrides(text: str | None) -> Mapping[str, Mapping[str, Any]]:
    """`--stage-overrides`: a JSON object of objects."""
    try:
        return msgspec.convert(json.loads(text or "{}"), dict[str, dict[str, Any]])
    except (json.JSONDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"--stage-overrides must be like '{{\"0\": {{\"max_num_seqs\": 4}}}}': {error}") from None


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `ConfigError`, and names the nearest flag for an unknown one."""

    def error(self, message: str) -> Any:
        """Refuse."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown is not None:
            message = f"{unknown[1]}: unknown flag{_hint(self._near(unknown[1]))}."
        raise ConfigError(message)

    def _near(self, flag: str) -> list[str]:
        known = [option for action in self._actions for option in action.option_strings]
        return get_close_matches(flag, known, 1)


def _hint(near: Sequence[str]) -> str:
    return f", did you mean {near[0]}?" if near else ""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _name_flag(error: str) -> str:
    match = re.search(r"^(.*) - at `\$\.(\w+)", error)
    return f"{_flag(match[2])}: {match[1]}." if match else error
