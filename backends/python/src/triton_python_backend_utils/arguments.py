"""Conversions of arguments, as in Triton's pb_utils.

Triton's pb_utils is C++ with pybind11, so models may pass bytes for text and NumPy scalars for numbers. Values that
pybind11 refuses raise TypeError. Each function returns a plain str, int or float.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar

import numpy as np

Choice = TypeVar("Choice", bound=IntEnum)

UINT32, UINT64, INT64 = range(1 << 32), range(1 << 64), range(-1 << 63, 1 << 63)

#: The types that `text` accepts; bytes are UTF-8.
Text: TypeAlias = "str | bytes | bytearray"


def text(value: Any, what: str) -> str:
    """Return ``value`` as a str. Raises TypeError, naming ``what``, and UnicodeDecodeError for invalid UTF-8."""
    if type(value) is str:
        return value
    if isinstance(value, str):  # for example a str of NumPy
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return value.decode()
    raise _wrong(what, "a str", value)


def lines(value: Any, what: str) -> str:
    """Return ``value`` as a str for people: bytes that are no UTF-8 are shown as escapes."""
    if isinstance(value, (bytes, bytearray)):
        return value.decode(errors="backslashreplace")
    return text(value, what)


def texts(values: Any, what: str) -> tuple[str, ...]:
    """Return `text` of each value."""
    return tuple([value if type(value) is str else text(value, what) for value in items(values, what)])


def items(values: Any, what: str) -> Sequence[Any]:
    """Return ``values`` if they are a sequence, and neither text, a set nor an iterator. Raises TypeError."""
    if type(values) is list:
        return values
    if isinstance(values, (tuple, np.ndarray)):
        return values  # type: ignore[return-value]  # an array can be used as a sequence
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray)):
        return values
    raise _wrong(what, "a list", values)


def whole_number(value: Any, what: str, among: range) -> int:
    """Return an integer. Raises TypeError for a float, and for an integer that is not ``among`` the allowed ones."""
    number = value if type(value) is int else _converted(value, int, what, "an int")
    if number not in among:
        raise TypeError(f"{what} must be from {among.start} to {among.stop - 1}, found {number}")
    return number


def real_number(value: Any, what: str) -> float:
    """Return the value as a float."""
    return value if type(value) is float else _converted(value, float, what, "a number")


def truth(value: Any, what: str) -> bool:
    """Return ``value``, a bool or another number, as a bool."""
    if isinstance(value, (int, float, np.bool_, np.number)):
        return bool(value)
    if isinstance(value, np.ndarray) and value.size == 1:
        return bool(value.item())
    raise _wrong(what, "a bool", value)


def choice(value: Any, kind: type[Choice], what: str) -> Choice:
    """Return ``value`` if it is a member of ``kind``. Raises TypeError otherwise, also for the number of a member."""
    if isinstance(value, kind):
        return value
    members = ", ".join(member.name for member in kind)
    raise _wrong(what, f"of type {kind.__name__} ({members})", value)


def instance(value: Any, kind: type[Any], what: str) -> None:
    """Raise TypeError unless the value is a ``kind``."""
    if not isinstance(value, kind):
        raise _wrong(what, f"of type {kind.__name__}", value)


def _converted(value: Any, kind: type[Any], what: str, expected: str) -> Any:
    """Return ``value`` as ``kind``. A float is no integer, and text is no number.

    An array of one element counts as that element, which newer releases of NumPy do not convert.
    """
    if isinstance(value, np.ndarray) and value.ndim and value.size == 1:
        value = value.item()
    is_text = isinstance(value, (str, bytes, bytearray))
    if is_text or (kind is int and isinstance(value, float)):
        raise _wrong(what, expected, value)
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise _wrong(what, expected, value) from None


def _wrong(what: str, expected: str, value: Any) -> TypeError:
    return TypeError(f"{what} must be {expected}, found type '{type(value).__name__}'")
