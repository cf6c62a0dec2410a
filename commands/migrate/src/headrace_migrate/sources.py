"""Which kind of input a text or a file is, by its content."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path

from headrace_migrate.dockerfile_syntax import NAMES
from headrace_migrate.report import BadInput

#: The largest text that is read: the manifests of a whole cluster are smaller.
MAX_BYTES = 4 << 20


class SourceKind(Enum):
    """The kinds of texts."""

    SHELL = "command line"
    DOCKERFILE = "Dockerfile"
    YAML = "manifest"
    PROPERTIES = "TorchServe's config.properties"


def read_text(name: str) -> str:
    """Return the text of the file ``name``, or of stdin for ``-``. Raises `BadInput`."""
    try:
        if name == "-":
            content = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # a FIFO without a writer does not block
            with os.fdopen(os.open(name, flags), "rb") as file:
                if not Path(name).is_file():
                    raise BadInput(f"{name}: no regular file")
                content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{name}: {error.strerror or error}") from error
    if len(content) > MAX_BYTES:
        raise BadInput(f"{name}: more than {MAX_BYTES >> 20} MiB: no manifest is so large")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{name}: no text in UTF-8: byte {error.start} is {content[error.start]:#04x}") from error
    if "\0" in text:
        raise BadInput(f"{name}: no text: it has a NUL at offset {text.index(chr(0))}")
    return text


def kind_of(text: str, name: str) -> SourceKind:
    """Return what ``text``, of the file ``name``, is. Raises `BadInput` for an empty one."""
    lines = [line.strip() for line in text.removeprefix("\ufeff").splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise BadInput(f"{name}: empty")
    first = lines[0].split(maxsplit=1)[0]
    if text.startswith("#!"):
        return SourceKind.SHELL
    if Path(name).suffix == ".properties":
        return SourceKind.PROPERTIES
    if first.upper() in NAMES and any(line.split(maxsplit=1)[0].upper() == "FROM" for line in lines):
        return SourceKind.DOCKERFILE
    is_yaml = Path(name).suffix in (".yaml", ".yml", ".json") or first.endswith(":") or first in ("---", "-", "{")
    return SourceKind.YAML if is_yaml or lines[0].startswith(("%YAML", "{")) else SourceKind.SHELL
