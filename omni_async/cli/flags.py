"""Flags made from config structs, so that every field is a flag and no flag is without a field."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar, get_args

import msgspec
import yaml

from omni_async.cli.help_texts import HELP
from omni_async.config import StageConfig
from omni_async.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)
STAGE_FLAG = re.compile(r"--stage-(\d+)-([a-z0-9_-]+)(?:=(.*))?", re.DOTALL)
STAGE_FLAG_HELP = "--stage-N-FIELD VALUE sets a field of the stage with stage_id N: --stage-1-max-num-seqs 8."


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `ConfigError`, and names the nearest flag for an unknown one."""

    def __init__(self, command: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog=f"omni-async {command}", description=description, epilog=epilog, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        """Refuse."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown is not None:
            known = [option for action in self._actions for option in action.option_strings]
            raise ConfigError(f"{unknown[1]}: unknown flag{_nearest(unknown[1], known)}")
        raise ConfigError(message)


def add_struct(
    parser: Parser, struct: type[msgspec.Struct], title: str, *, without: Collection[str] = ()
) -> None:
    """One flag per field of `struct`, checked against the field's type and range as it is read.

    A field that holds a tuple becomes a flag in the singular that may be repeated.
    """
    group = parser.add_argument_group(title)
    for field in msgspec.structs.fields(struct):
        if field.name in without:
            continue
        text = HELP[struct.__name__, field.name]
        if field.type is bool:
            group.add_argument(
                _flag(field.name), dest=field.name, action="store_true", default=None, help=text
            )
        elif isinstance(field.default, tuple):
            flag = _flag(field.name).removesuffix("s")
            group.add_argument(flag, dest=field.name, action="append", metavar="TEXT", help=text)
        else:
            shown = "" if field.default in (None, msgspec.NODEFAULT) else f" (default {field.default})"
            group.add_argument(
                _flag(field.name),
                dest=field.name,
                metavar=_metavar(field.type),
                type=_reader(field.type),
                help=text + shown,
            )


def _metavar(kind: Any) -> str:
    text = str(kind)
    if _is_json(kind):
        return "JSON"
    return "N" if "int" in text else "X" if "float" in text else "TEXT"


def _is_json(kind: Any) -> bool:
    if any(container in str(kind) for container in ("list[", "dict[")):
        return True
    return any(isinstance(each, type) and issubclass(each, msgspec.Struct) for each in get_args(kind))


def _reader(kind: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            if _is_json(kind):
                return msgspec.json.decode(text, type=kind)
            return msgspec.convert(text, kind, strict=False)
        except msgspec.DecodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is refused: {error}.") from None

    return read


def to_struct(args: argparse.Namespace, struct: type[T]) -> T:
    """The struct of the flags that were given; fields without flag keep their defaults."""
    given = {name: getattr(args, name, None) for name in struct.__struct_fields__}
    return msgspec.convert({name: value for name, value in given.items() if value is not None}, struct)


def take_stage_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Split `--stage-N-FIELD VALUE` from the rest: what is left, and {N: {field: value}}.

    Values of fields that are not text are read as YAML. Raises `ConfigError` for a field that stages do
    not have.
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
        field = name.replace("-", "_")
        if field not in StageConfig.__struct_fields__:
            raise ConfigError(f"{word}: unknown flag{_nearest(word, _stage_flags(number))}")
        if value is None and (value := next(words, None)) is None:
            raise ConfigError(f"{word} needs a value.")
        found.setdefault(number, {})[field] = _stage_value(field, value, word)
    return rest, found


def _stage_flags(number: str) -> list[str]:
    return [_flag(f"stage_{number}_{name}") for name in StageConfig.__struct_fields__]


def _stage_value(field: str, text: str, flag: str) -> Any:
    kind = {each.name: each.type for each in msgspec.structs.fields(StageConfig)}[field]
    if kind is str:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{flag}: {text!r} cannot be read.") from None
    names = field == "inputs" and isinstance(value, str)
    return [name.strip() for name in text.split(",")] if names else value


def read_overrides(text: str | None) -> Mapping[str, Mapping[str, Any]]:
    """`--stage-overrides`: a JSON object of objects."""
    try:
        return msgspec.convert(json.loads(text or "{}"), dict[str, dict[str, Any]])
    except (json.JSONDecodeError, msgspec.ValidationError) as error:
        example = '{"0": {"max_num_seqs": 4}}'
        raise ConfigError(f"--stage-overrides must be JSON like '{example}': {error}.") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest(flag: str, known: Sequence[str]) -> str:
    near = get_close_matches(flag, known, 1)
    return f", did you mean {near[0]}?" if near else "; --help lists them."
