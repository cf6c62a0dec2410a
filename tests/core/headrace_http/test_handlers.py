"""The files of a load, in base64; the oracle is the standard library."""

from __future__ import annotations

import base64

import pytest

from headrace_http import handlers


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 60, 61, 62])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 7, 100])
def test_base64_in_parts_is_base64(size: int, step: int) -> None:
    data = bytes(range(size))
    text = base64.b64encode(data).decode()
    parts = [text[at : at + step] for at in range(0, len(text), step)]
    assert b"".join(handlers._decode(parts)) == data


@pytest.mark.parametrize("parts", ["A==,=QUJD", "QQ==,QUJD", "QQ==QUJD", "Q", "QU,J", "Q?JD", "====", "QQ=,=="])
def test_invalid_base64_is_refused_however_it_is_cut(parts: str) -> None:
    with pytest.raises(ValueError, match=r"padding|base64|number of data"):
        b"".join(handlers._decode(parts.split(",")))
