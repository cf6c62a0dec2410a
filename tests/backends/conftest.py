"""Memory whose previous contents are known."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

#: The option of glibc's ``mallopt`` that fills each block as it is allocated, with the complement of the given byte.
_M_PERTURB = -6
UNWRITTEN_BYTE = 0xA5


@pytest.fixture
def unwritten_byte() -> Iterator[int]:
    """The value of unwritten bytes in memory that is allocated during the test."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(_M_PERTURB, UNWRITTEN_BYTE ^ 0xFF)
    yield UNWRITTEN_BYTE
    assert libc.mallopt(_M_PERTURB, 0)
