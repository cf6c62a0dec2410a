"""Files of a model, checked before transformers reads them: files of weights, and of JSON. Nothing is imported."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, Final

from headrace import LoadError, one_line, open_regular

#: The limit of the format itself for the header of a file of weights, and that of a file of JSON, in bytes.
MAX_HEADER_BYTES, MAX_JSON_BYTES = 100 << 20, 64 << 20
#: The most values in a header or a file of JSON, roughly: each takes about 64 bytes when Python has read it.
MAX_VALUES: Final = 1 << 22


def check_files(folder: Path) -> None:
    """Check what transformers may read of ``folder``: regular files, and JSON of a bounded size.

    Raises `LoadError` with the file.
    """
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            continue
        try:
            with open_regular(path) as file:
                text = file.read(MAX_JSON_BYTES + 1) if path.suffix == ".json" else b""
        except OSError as error:
            raise LoadError(f"unable to read {path}: {error.strerror or error}") from error
        if len(text) > MAX_JSON_BYTES:
            raise LoadError(f"{path} has more than {MAX_JSON_BYTES} bytes")
        _check_values(path, text)


def _check_values(path: Path, text: bytes) -> None:
    if len(text) > MAX_VALUES and (count := sum(map(text.count, (b",", b"[", b"{")))) > MAX_VALUES:
        raise LoadError(f"{path} has {count} commas and brackets, the limit is {MAX_VALUES}")


def tensor_sizes(path: Path) -> Iterator[int]:
    """Yield how many numbers each tensor of a safetensors file has. Raises `LoadError`.

    Source: the format's README: 8 bytes with the size N of the header, N bytes of JSON, the data.
    """
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise LoadError(f"{path} is not a complete safetensors file: it has {size} bytes")
            text = file.read(length)
            _check_values(path, text)
            header = json.loads(text)
    except OSError as error:
        raise LoadError(f"unable to read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not a safetensors file: {error}") from None
    if type(header) is not dict:
        raise LoadError(f"{path} is not a safetensors file: its header is no JSON object")
    end = total = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        members = entry if type(entry) is dict else {}
        shape, offsets = (_whole_numbers(members.get(key)) for key in ("shape", "data_offsets"))
        if shape is None or offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise LoadError(f"{path} is not a safetensors file: tensor '{one_line(name)[:200]}' has no shape")
        end = max(end, offsets[1])
        total += (numbers := prod(shape))
        yield numbers
    if size < 8 + length + end:
        raise LoadError(f"{path} is truncated: it has {size} bytes, its header needs {8 + length + end}")
    if total > 8 * size:  # a number takes at least a bit
        raise LoadError(f"{path} describes {total} numbers in {size} bytes")


def _whole_numbers(values: Any) -> list[int] | None:
    """Return ``values`` if it is a list of at most 64 whole numbers, none of them negative."""
    if type(values) is not list or len(values) > 64:
        return None
    return values if all(type(each) is int and 0 <= each < 1 << 63 for each in values) else None
