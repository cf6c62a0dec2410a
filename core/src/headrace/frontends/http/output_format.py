"""In which format a caller wants each output: JSON, binary, or as its top classes."""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.errors import InvalidArgument
from headrace.frontends.http.documents import as_array, as_boolean, as_object, as_string, as_unsigned, member
from headrace.frontends.shared_memory import no_region

#: Beyond this a count is an attack or a mistake; Triton's own limit on elements is far below.
_MAX_CLASSES = 2**31 - 1


class OutputFormat(NamedTuple):
    """``classes`` above 0 asks for that many entries of classification."""

    is_binary: bool
    classes: int = 0


JSON = OutputFormat(False)
BINARY = OutputFormat(True)


def read_outputs(entries: Any) -> tuple[list[str], dict[str, OutputFormat]]:
    """The names requested, in order and with repetitions, and the format of each."""
    names, formats = [], {}
    for entry in as_array(entries, "outputs"):
        name = as_string(member(as_object(entry, "outputs"), "name"), "name")
        parameters = entry.get("parameters")
        names.append(name)
        formats[name] = JSON if not parameters else _format(name, as_object(parameters, "parameters"))
    return names, formats


def _format(name: str, parameters: dict[str, Any]) -> OutputFormat:
    is_binary = as_boolean(parameters.get("binary_data", False), "binary_data")
    classes = as_unsigned(parameters.get("classification", 0), "classification")
    if "shared_memory_region" in parameters:
        _refuse_shared_memory(parameters, is_binary)
    if classes > _MAX_CLASSES:
        raise InvalidArgument(
            f"'classification' of output '{name}' is {classes}, but at most {_MAX_CLASSES} is allowed"
        )
    return OutputFormat(is_binary, classes) if classes else BINARY if is_binary else JSON


def _refuse_shared_memory(parameters: dict[str, Any], is_binary: bool) -> None:
    region = as_string(parameters["shared_memory_region"], "shared_memory_region")
    if "classification" in parameters:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
    if is_binary:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
    raise no_region(region)
