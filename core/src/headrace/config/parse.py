"""Parses model configs in protobuf text format. Errors name the place, the problem and a likely correction.

Source: docs/spec/behaviours.md sections 4.1 and 5.4.
"""

from __future__ import annotations

import contextlib
import re
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from google.protobuf import text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.text_format import ParseError

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.regular_files import open_regular
from headrace.config.source_map import SourceMap, SourcePlace, place_at
from headrace.errors import ConfigError

#: The largest config that is parsed. No hand-written config is nearly as large.
MAX_BYTES = 4 * 1024 * 1024
#: A longer config is parsed again each time.
_KEPT_CHARACTERS = 16 * 1024


def find_config(model_path: Path, config_name: str = "") -> Path | None:
    """Return the config file of a model: ``configs/<config_name>.pbtxt`` if it exists, else ``config.pbtxt``, else None
    (``--model-config-name``, docs/spec/behaviours.md section 4.1).

    Raises `ConfigError` for a name that leaves ``configs``.
    """
    if config_name in (".", "..") or "/" in config_name or "\0" in config_name:
        raise ConfigError(f"model config name '{config_name}' must be a file name without directories")
    candidates = [model_path / "configs" / f"{config_name}.pbtxt"] if config_name else []
    for path in (*candidates, model_path / "config.pbtxt"):
        if path.is_file():
            return path
    return None


def read_config(path: Path) -> ModelConfig:
    """Return the config in the file ``path``. Raises `ConfigError` that starts with ``path``, and ``:line:column`` if
    the content is wrong."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes, the limit of a config")
    return parse_text(text, str(path))


def parse_text(text: str, source: str = "config") -> ModelConfig:
    """Return the config that ``text`` has in protobuf text format. Raises `ConfigError` that starts with
    ``source:line:column: field:``."""
    with contextlib.suppress(ParseError):  # reported below, with its line
        if len(text) <= _KEPT_CHARACTERS:
            first = _NAME.match(text)
            start, name = (first.end(), first[1]) if first is not None else (0, "")
            config = ModelConfig.FromString(_parsed(text[start:], bool(name)))
            config.name = name or config.name
            return config
    config = ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        line, column, field, reason = explain_text(error, text, ModelConfig.DESCRIPTOR)
        message = f"{source}:{line}:{column}: {f'{field}: ' if field else ''}{reason}"
        raise ConfigError(message, field=field, line=line, column=column) from error
    return config


@lru_cache(maxsize=64)  # the configs of many models differ only in the name, and models are loaded again
def _parsed(text: str, has_name: bool) -> bytes:
    """Return the serialized config that ``text`` has, after a line with a name if ``has_name``. Raises `ParseError`."""
    config = ModelConfig()
    text_format.Parse('name: "m"\n' + text if has_name else text, config)
    if has_name and config.name != "m":
        raise ParseError("the name goes on in the next line")
    return config.SerializeToString()


def place_of(field: str, path: Path) -> str:
    """Return the place of ``field`` in the config file ``path``, as the start of a log line."""
    try:
        position = SourceMap(path.read_text(encoding="utf-8-sig"), ModelConfig.DESCRIPTOR).find(field)
    except (OSError, UnicodeDecodeError):  # it has changed since it was parsed
        position = None
    return ":".join((str(path), *map(str, position or ()), f" {field}: "))


_NAME = re.compile(r'\s{0,9}name {0,9}: {0,9}"([\w.-]{1,99})"[ \t]{0,9}\r?\n')
_UNKNOWN_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "([^"]*)"')
_WRONG_VALUE = re.compile(
    r"Couldn't parse (integer|float)|Value out of range|Expected string|Expected \"true\" or|has no value named"
)
_REPEATED = re.compile(r"should not have multiple")
_MISSING_MARK = re.compile(r'Expected "(.)"')
_LIMITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_KINDS = {
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_STRING: "a quoted string",
}


def explain_text(error: ParseError, text: str, root: Descriptor) -> tuple[int, int, str, str]:
    """Return line, column, field and reason of an error in ``text``, a message of type ``root``."""
    line, column = error.GetLine() or 1, error.GetColumn() or 1
    reason = str(error).removeprefix(f"{line}:{column} : ")
    quoted = "'" + text.split("\n")[line - 1] + "': "
    place = place_at(text, root, line, column)
    # The parser quotes the line, except at the end of the text.
    actual = clip(place.found) if reason.startswith(quoted) else "the end"
    reason = reason.removeprefix(quoted)
    hint = _hint(text.split("\n")[line - 1][column - 1 :], place, reason)
    return line, column, place.path, _reword(reason, place, actual, hint)


def unknown_field(message: Descriptor, name: str) -> str:
    """Return the text that ``message`` has no field ``name``, with the most similar field or all fields."""
    known = list(message.fields_by_name)
    hint = _suggest(name, known) or f"its fields are {', '.join(known)}"
    return f"{_short(message.full_name)} has no field '{clip(name)}'; {hint}"


def shorten(reason: str) -> str:
    """Return an error text of the JSON parser without the name of our package and the path to the field."""
    reason = re.sub(r"Failed to parse [\w.]+ field: (?=Failed to parse )", "", reason).rstrip(".")
    return clip(re.sub(r'\bheadrace\.| at "?ModelConfig"?$|(?<= at )ModelConfig\.', "", reason), 300)


def _reword(reason: str, place: SourcePlace, actual: str, hint: str) -> str:
    unknown = _UNKNOWN_FIELD.match(reason)
    mark = _MISSING_MARK.match(reason)
    if unknown is not None:
        return _unknown_in(place, unknown[1], unknown[2])
    if place.field is not None and _WRONG_VALUE.search(reason):
        return f"expected {_expected(place.field)}, found {actual}{_nearest_value(place.field, actual)}{hint}"
    if mark is not None:
        return f"expected '{mark[1]}', found {actual}{hint}"
    if _REPEATED.search(reason):
        return "is given more than once"
    return clip(_short(reason).rstrip("."), 300) + hint


def _hint(rest: str, place: SourcePlace, reason: str) -> str:
    """Return a hint if ``rest`` begins with JSON or with a comment of another language: the text to write instead."""
    if rest.startswith(("//", "/*")):
        return "; a comment begins with '#'"
    if not reason.startswith("Expected identifier"):
        return ""
    if rest[:1] in ("{", "[") and not place.path:
        return (
            "; this looks like JSON, and a config is protobuf text format: no braces around it, no quotes around names"
        )
    return "; the name of a field has no quotes" if rest[:1] in ("'", '"') else ""


def _unknown_in(place: SourcePlace, message: str, name: str) -> str:
    if place.message is not None and place.message.full_name == message:
        return unknown_field(place.message, name)
    return f"{_short(message)} has no field '{name}'"


def _expected(field: FieldDescriptor) -> str:
    if field.enum_type is not None:
        return "one of " + ", ".join(value.name for value in field.enum_type.values if value.name != "TYPE_INVALID")
    if field.cpp_type in _LIMITS:
        least, most = _LIMITS[field.cpp_type]
        return f"a whole number from {least} to {most}"
    return _KINDS[field.cpp_type]


def _nearest_value(field: FieldDescriptor, actual: str) -> str:
    if field.enum_type is None:
        return ""
    names = list(field.enum_type.values_by_name)
    prefix = names[0].partition("_")[0] + "_"  # TYPE_, which makes all names similar
    hint = _suggest(prefix + actual.removeprefix(prefix), names, len(prefix))
    return f"; {hint}" if hint else ""


def _suggest(name: str, known: list[str], start: int = 0) -> str:
    """Return "did you mean '...'?" with the name that is most similar from ``start`` on, ignoring case; empty if no
    name is similar.
    """
    originals = {other[start:].lower(): other for other in known}
    nearest = get_close_matches(clip(name)[start:].lower(), originals, 1, cutoff=0.5)
    return f"did you mean '{originals[nearest[0]]}'?" if nearest else ""


def _short(name: str) -> str:
    return name.replace("headrace.", "")


def clip(text: str, limit: int = 60) -> str:
    """Return ``text`` as one printable line of at most ``limit`` characters and an ellipsis, for logs and errors."""
    line = text if text.isprintable() else text[:limit].encode("unicode_escape").decode()
    return line if len(line) <= limit else f"{line[:limit]}..."
