"""TOML tables into records, and what is wrong with them into words.

The rule: nothing is guessed. Whatever does not fit raises ConfigError with the key's path, what
was found there and what was expected.
"""

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import inspect

from swarm.errors import ConfigError

T = TypeVar("T")


def read_text(path: Path, what: str = "a TOML file") -> str:
    """Return the text of a UTF-8 file, which should be `what`. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}",
            evidence=(error.strerror or str(error),),
            hint=f"give the path of {what}",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text", evidence=(str(error),), hint="save it as UTF-8"
        ) from error


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises ConfigError, with the line where it can."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        lines = text.splitlines()
        number = int(place[1]) if place else len(lines)
        line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        raise ConfigError(
            f"{source} is not TOML: {error}",
            evidence=(f"line {number}: {line[:120]}",),
            hint="texts stand in quotes, true and false in lower case",
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply") from error


def fields_of(kind: type) -> tuple[inspect.Field, ...]:
    """Return the fields of a struct or a dataclass with their types as msgspec sees them."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType | inspect.DataclassType)
    return info.fields


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the tables of one file into records."""

    source: str
    """Names the file in errors."""
    manual: str
    """Where all keys are explained."""
    root: str = ""
    """Table that holds the top record's plain values."""

    def fail(self, path: str, value: object, expected: str, hint: str = "") -> NoReturn:
        """Raise ConfigError: `value` at `path` (None: nothing is there) is not as expected."""
        found = "is missing" if value is None else f"= {toml(value, 100)} cannot be used"
        raise ConfigError(
            f"{self.source}: {path} {found}",
            evidence=(f"expected {expected}",),
            hint=hint or f"see {self.manual}",
        )

    def table(self, value: object, path: str) -> dict[str, Any]:
        """Return `value`, which must be a table."""
        if not isinstance(value, dict):
            self.fail(path, value, f"a table, [{path}]")
        return value

    def refuse_unknown(
        self,
        raw: Mapping[str, object],
        known: tuple[str, ...],
        table: str,
        others: Mapping[str, tuple[str, ...]],
    ) -> None:
        """Refuse keys that are not `known`; `others` tells in which tables a stray may belong."""
        for key in raw:
            if key in known:
                continue
            homes = [f"[{name}]" for name, keys in others.items() if key in keys and name != table]
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"remove it, or see {self.manual}"
            if homes:
                hint = f"`{key}` belongs in {' or '.join(homes)}"
            elif near:
                hint = f"did you mean `{near[0]}`?"
            place = f"in [{table}]" if table else "at the top level"
            raise ConfigError(
                f"{self.source}: unknown key `{key}` {place}",
                evidence=(f"keys {place}: {', '.join(known)}",),
                hint=hint,
            )

    def build(self, raw: Mapping[str, object], kind: type[T], path: str) -> T:
        """Return `raw` as a `kind`, field by field, so that an error can name its key."""
        known = tuple(field.name for field in fields_of(kind))
        self.refuse_unknown(raw, known, path, {})
        hints = get_type_hints(kind, include_extras=True)
        values: dict[str, object] = {}
        for field in fields_of(kind):
            place = self._place(path, field)
            if field.name in raw:
                values[field.name] = self._value(raw[field.name], hints[field.name], place)
            elif field.required:
                self.fail(place, None, _describe(field.type))
        return kind(**values)

    def _place(self, path: str, field: inspect.Field) -> str:
        above = path or ("" if isinstance(field.type, inspect.StructType) else self.root)
        return f"{above}.{field.name}" if above else field.name

    def _value(self, value: object, hint: Any, path: str) -> object:
        info = inspect.type_info(hint)
        if isinstance(info, inspect.UnionType):
            inner = [kind for kind in get_args(hint) if _is_record(kind)]
            if inner:
                return self._value(value, inner[0], path)
        if isinstance(info, inspect.StructType):
            return self.build(self.table(value, path), info.cls, path)
        if isinstance(info, inspect.DictType):
            item = get_args(hint)[1]
            pairs = self.table(value, path).items()
            return {key: self._value(each, item, f"{path}.{key}") for key, each in pairs}
        try:
            converted: object = msgspec.convert(value, hint, strict=True)
        except msgspec.ValidationError:
            self.fail(path, value, _describe(info), _nearest(value, info))
        for number in converted if isinstance(converted, list | tuple) else (converted,):
            if isinstance(number, int) and not -(2**63) <= number < 2**63:
                self.fail(path, number, "an integer of 64 bits")
        return converted


def _is_record(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


# --- words for types and values -------------------------------------------------------------


def _describe(info: inspect.Type) -> str:
    match info:
        case inspect.LiteralType(values=values):
            return choices(sorted(str(value) for value in values))
        case inspect.IntType() | inspect.FloatType():
            noun = "an integer" if isinstance(info, inspect.IntType) else "a number"
            return noun + _limits(info)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType(pattern=str(pattern)):
            return f"a text that matches {pattern}"
        case inspect.StrType(min_length=low, max_length=high):
            return "a text" + (f" of {low or 0} to {high} characters" if high else "")
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return f"a list, each item {_describe(item)}"
        case inspect.TupleType(item_types=items):
            return f"a list of {len(items)}, each {_describe(items[0])}"
        case inspect.UnionType(types=types):
            return " or ".join(_describe(each) for each in types)
        case _:
            return "a table"


def _limits(info: inspect.IntType | inspect.FloatType) -> str:
    if info.gt is not None:
        return f" above {info.gt}"
    if info.ge is not None and info.le is not None:
        return f" from {info.ge} to {info.le}"
    return f" of at least {info.ge}" if info.ge is not None else ""


def choices(values: Iterable[str]) -> str:
    """Return words for a choice between texts."""
    return "one of " + ", ".join(toml(value) for value in values)


def _nearest(value: object, info: inspect.Type) -> str:
    if isinstance(info, inspect.LiteralType) and isinstance(value, str):
        known = [str(each) for each in info.values]
        near = difflib.get_close_matches(value.lower(), known, n=1)
        return f"did you mean {toml(near[0])}?" if near else ""
    return ""


def toml(value: object, limit: int = 0) -> str:
    """Return `value` as TOML writes it, cut after `limit` characters if that is not 0."""
    match value:
        case str():
            # JSON's escapes are TOML's, except that TOML wants DEL escaped too
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case bool():
            text = "true" if value else "false"
        case list() | tuple():
            text = "[" + ", ".join(toml(each) for each in value) + "]"
        case dict():
            text = "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
        case _:
            text = str(value)
    return text if not limit or len(text) <= limit else text[:limit] + "…"
