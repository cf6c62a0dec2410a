"""Conversions of arguments, as in Triton's pb_utils.

That is C++ with pybind11, so models may pass bytes for text and NumPy scalars for numbers, and do. What pybind11
refuses raises TypeError here, too. Each function returns a plain str, int or float.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeAlias, TypeVar

import numpy as np

Choice = TypeVar("Choice", bound=IntEnum)

UINT32, UINT64, INT64 = range(1 << 32), range(1 << 64), range(-1 << 63, 1 << 63)

#: What `text` takes; bytes are UTF-8.
Text: TypeAlias = "str | bytes | bytearray"


def text(value: Any, what: str) -> str:
    """Raises TypeError, naming ``what``, and UnicodeDecodeError for bytes that are no UTF-8."""
    if type(value) is str:
        return value
    if isinstance(value, str):  # of NumPy, say
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return value.decode()
    raise _wrong(what, "a str", value)


def lines(value: Any, what: str) -> str:
    """Return `text` for people: bytes that are no UTF-8 are shown as escapes."""
    if isinstance(value, (bytes, bytearray)):
        return value.decode(errors="backslashreplace")
    return text(value, what)


def texts(values: Any, what: str) -> tuple[str, ...]:
    """Return `text` of each."""
    return tuple([value if type(value) is str else text(value, what) for value in items(values, what)])


def items(values: Any, what: str) -> Sequence[Any]:
    """Return ``values`` if they are a sequence: no text, no set, nothing that can be read once only."""
    if type(values) is list:
        return values
    if isinstance(values, (tuple, np.ndarray)):
        return values  # type: ignore[return-value]  # an array has all that is asked of it
    if isinstance(values, Sequence) and not isinstance(values, (str, bytes, bytearray)):
        return values
    raise _wrong(what, "a list", values)


def whole_number(value: Any, what: str, among: range) -> int:
    """Return an integer value, not a float. Raises TypeError for one that is not ``among`` the allowed ones."""
    number = value if type(value) is int else _converted(value, int, what, "an int")
    if number not in among:
        raise TypeError(f"{what} must be from {among.start} to {among.stop - 1}, found {number}")
    return number


def real_number(value: Any, what: str) -> float:
    """Return the value as a float."""
    return value if type(value) is float else _converted(value, float, what, "a number")


def truth(value: Any, what: str) -> bool:
    """True, False, or another number."""
    if isinstance(value, (int, float, np.bool_, np.number)):
        return bool(value)
    if isinstance(value, np.ndarray) and value.size == 1:
        return bool(value.item())
    raise _wrong(what, "a bool", value)


def choice(value: Any, kind: type[Choice], what: str) -> Choice:
    """Return ``value`` if it is a member of ``kind``; raises TypeError for anything else, such as its number."""
    if isinstance(value, kind):
        return value
    members = ", ".join(member.name for member in kind)
    raise _wrong(what, f"of type {kind.__name__} ({members})", value)


def instance(value: Any, kind: type[Any], what: str) -> None:
    """Raise TypeError unless the value is a ``kind``."""
    if not isinstance(value, kind):
        raise _wrong(what, f"of type {kind.__name__}", value)


def _converted(value: Any, kind: type[Any], what: str, expected: str) -> Any:
    """Return ``value`` as ``kind``. A float is no integer, and text is no number, whatever it says.

    An array of one element is that element, which newer releases of NumPy leave to us.
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
