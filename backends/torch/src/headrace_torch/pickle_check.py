"""Checks pickles before PyTorch reads them, without creating objects.

- Values that crash or block its readers. The reader of TorchScript allocates any declared length and any index of its
  memo, up to 64 GiB, before it reads on. The reader of weights matches a name in its error texts by patterns of
  quadratic time: minutes for 70 KiB. Both hold the interpreter's lock meanwhile, so the server stops.
- Tensors that claim to be larger than their data in the file. PyTorch makes a storage of the size in the pickle on
  memory into which it has read the file's data: the rest is memory of others.

PyTorch and `headrace_torch.script_check` check the names in a pickle.
"""

from __future__ import annotations

import io
import pickletools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace import one_line

#: Characters of a name, and of any text without a space in it.
_MOST_CHARACTERS = 4096


def damage(content: bytes, count: int = 1) -> str:
    """Return the fault of the first pickles in ``content``, at most ``count``; empty if there is none."""
    stream = io.BytesIO(content)
    for _ in range(count):
        if stream.tell() == len(content) > 0:
            break
        try:
            for operation, argument, at in pickletools.genops(stream):
                if operation.name == "LONG_BINPUT" and int(argument or 0) > len(content):
                    return f"at byte {at}, it remembers more objects than it has bytes"
                words = argument.split() if isinstance(argument, str | bytes) else ()
                if max(map(len, words), default=0) > _MOST_CHARACTERS:
                    return f"at byte {at}, it has a name of more than {_MOST_CHARACTERS} characters"
        except ValueError as error:
            return one_line(str(error))
    return ""


# ---------------------------------------------------------------------- sizes of tensors

#: PyTorch's names of storages that differ from the names of their types.
_TYPES = {
    "Untyped": "uint8", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64",
    "Half": "float16", "Float": "float32", "Double": "float64", "ComplexHalf": "complex32",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
_MARK = object()
_CONSTANTS = (
    "INT",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG",
    "LONG1",
    "LONG4",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "UNICODE",
)


@dataclass(frozen=True, slots=True)
class Global:
    """A name in a pickle, as ``module name``."""

    name: str


@dataclass(frozen=True, slots=True)
class TensorStorage:
    """A pickle's description of a tensor's memory: the key of its record, and its size in bytes."""

    key: str
    size: int


def oversized(torch: Any, reader: Any, folder: str) -> str:
    """Return the first tensor of the pickle ``<folder>.pkl`` that is larger than its record; empty if there is none.

    ``reader`` is a ``PyTorchFileReader``. Raises `ValueError` for a pickle that PyTorch does not write.
    """
    for storage in storages(torch, reader.get_record(f"{folder}.pkl")):
        record = f"{folder}/{storage.key}"
        size = _record_size(reader, record) if reader.has_record(record) else 0
        if storage.size > size:
            return f"tensor '{one_line(storage.key)[:200]}' has {storage.size} bytes, and the file has {size} of them"
    return ""


def _record_size(reader: Any, record: str) -> int:
    """Return the size of ``record`` in bytes. PyTorch before 2.12 must read the record for it."""
    if hasattr(reader, "get_record_size"):
        return int(reader.get_record_size(record))
    return len(reader.get_record(record))


def absent(torch: Any, content: bytes) -> str:
    """Return the first tensor that a file of PyTorch before 1.6 lacks; empty if it has all.

    ``content`` begins with five pickles: the fourth declares the tensors, and the fifth has the keys of the data that
    follows. PyTorch refuses a file with fewer.
    """
    stream = io.BytesIO(content)
    try:
        for _ in range(3):
            deque(pickletools.genops(stream), 0)
        keys = [storage.key for storage in storages(torch, stream)]
        found = {argument for operation, argument, _ in pickletools.genops(stream) if operation.name == "BINUNICODE"}
    except ValueError:
        if stream.tell() < len(content):
            raise
        return ""
    missing = [key for key in keys if key not in found]
    return f"tensor '{one_line(missing[0])[:200]}' is not in the file" if missing else ""


def storages(torch: Any, pickle: bytes | io.BytesIO) -> Iterator[TensorStorage]:
    """Yield the storages that ``pickle`` names. Raises `ValueError` for a pickle that PyTorch does not write."""
    for persistent_id in _persistent_ids(pickle):
        match persistent_id:
            case ("storage", Global(name), str(key), str(), int(count), *_) if count >= 0:
                yield TensorStorage(key, count * _item_size(torch, name))
            case _:
                raise ValueError("it names a storage in a way of its own")


def _item_size(torch: Any, name: str) -> int:
    module, _, kind = name.partition(" ")
    kind = kind.removesuffix("Storage")
    dtype = getattr(torch, _TYPES.get(kind, kind.lower()), None)
    if module not in ("torch", "torch.storage") or not isinstance(dtype, torch.dtype):
        raise ValueError(f"it has a storage of the type '{name[:200]}'")
    return int(dtype.itemsize)


def _persistent_ids(pickle: bytes | io.BytesIO) -> Iterator[Any]:
    """Yield the persistent ids of a pickle: tuples of numbers, texts and globals; None for everything else."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    argument: Any
    for operation, argument, _ in pickletools.genops(pickle):
        name = operation.name
        popped = _pop(stack, operation)
        if name == "MARK":
            stack.append(_MARK)
        elif name in _CONSTANTS:
            stack.append(argument)
        elif name == "GLOBAL":
            stack.append(Global(argument))
        elif name.startswith("TUPLE"):
            stack.append(tuple(popped))
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo.get(int(argument)))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            stack += popped
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
        elif name == "DUP":
            stack += popped * 2
        else:
            if name == "BINPERSID":
                yield popped[0]
            stack += [None] * len(operation.stack_after)


def _pop(stack: list[Any], operation: Any) -> list[Any]:
    """Pop from ``stack`` as ``operation`` does. Raises `ValueError` if the stack is too short."""
    before = operation.stack_before
    if pickletools.markobject in before:
        at = next((place for place in reversed(range(len(stack))) if stack[place] is _MARK), -1)
        start = at - before.index(pickletools.markobject)
        if at < 0 or start < 0:
            raise ValueError(f"'{operation.name}' finds no mark")
    else:
        start = len(stack) - len(before)
    popped = stack[start:] if start >= 0 else [_MARK]
    if _MARK in popped and pickletools.markobject not in before:
        raise ValueError(f"'{operation.name}' finds too little")
    del stack[start:]
    return [each for each in popped if each is not _MARK]
