"""Responses as bytes: unpacking returns the packed response, and refuses all other bytes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import BytesTensor, CachedResponse, InvalidArgument, dtypes, pack_response, unpack_response

SHAPES = st.lists(st.integers(0, 4), max_size=4)
VALUES = st.text(max_size=9) | st.integers(-(1 << 63), (1 << 63) - 1) | st.booleans() | st.floats()


def tensor(datatype: str, shape: list[int], seed: int) -> Any:
    count, numbers = int(np.prod(shape, dtype=np.int64)), np.random.default_rng(seed)
    kind = dtypes.BY_NAME[datatype]
    if kind is dtypes.BYTES:
        return BytesTensor.from_items([numbers.bytes(int(n)) for n in numbers.integers(0, 9, count)], shape)
    return np.frombuffer(numbers.bytes(count * kind.itemsize), np.uint8).view(kind.numpy).reshape(shape)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(dtypes.BY_NAME)), SHAPES, st.integers(0, 99)), max_size=4),
    st.dictionaries(
        st.text(max_size=5),
        st.text(max_size=9) | st.integers(-(1 << 63), (1 << 63) - 1) | st.booleans() | st.floats(),
        max_size=3,
    ),
)
def test_packed_response_is_unpacked_unchanged(outputs: list[Any], parameters: dict[str, Any]) -> None:
    tensors = {f"out {n} é": tensor(*each) for n, each in enumerate(outputs)}
    unpacked = unpack_response(pack_response(CachedResponse(tensors, parameters)))
    assert list(unpacked.outputs) == list(tensors)
    for name, sent in tensors.items():
        came: Any = unpacked.outputs[name]
        assert type(came) is type(sent)
        assert came.shape == sent.shape
        if isinstance(came, BytesTensor):
            assert came.items() == sent.items()
        else:
            assert came.dtype == sent.dtype
            assert came.tobytes() == sent.tobytes()
            assert came.ctypes.data % 16 == 0 or not came.size
            assert not came.flags.writeable
    assert {key: (type(value), str(value)) for key, value in unpacked.parameters.items()} == {
        key: (type(value), str(value)) for key, value in parameters.items()
    }


PACKED = pack_response(CachedResponse({"y": np.arange(4, dtype=np.float32), "s": tensor("BYTES", [2], 1)}, {"p": 1}))


@given(st.data())
def test_no_bytes_raise_anything_but_a_refusal(data: st.DataObject) -> None:
    wrong = bytearray(PACKED)
    for _ in range(data.draw(st.integers(1, 4))):
        wrong[data.draw(st.integers(0, len(wrong) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(wrong[: data.draw(st.integers(0, len(wrong)))])
    for each in (bytes(wrong), cut, data.draw(st.binary(max_size=60))):
        try:
            unpacked = unpack_response(each)
        except InvalidArgument:
            continue
        assert sum(value.nbytes for value in unpacked.outputs.values()) <= len(each)


def packed(outputs: Any, parameters: Any = None, content: bytes = b"") -> bytes:
    header = json.dumps({"outputs": outputs, "parameters": parameters or {}}).encode()
    return b"HRC1" + len(header).to_bytes(4, "little") + header + content


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "0 bytes are not a packed response: it has no header"),
        (PACKED[:-1], "runs past the end|end at"),
        (PACKED + b"x", "its outputs end at"),
        (packed([["y", "FP32", [1 << 62, 4], 0]]), "0 bytes for FP32"),
        (packed([["y", "FP32", [0, 4], 0]] * 2), "an output has no name, or the name of another output"),
        (packed([["y", "FP32", [0, 1 << 62], 0]]), "too big"),
        (packed([["y", "FP32", [-1], 0]]), "is not an integer from 0"),
        (packed([["y", "FP32", [True], 4]], content=bytes(16)), "is not an integer from 0"),
        (packed([["y", "FP32", [1] * 40, 4]], content=bytes(16)), "a shape is not a list, or too long"),
        (packed([["y", "OBJECT", [1], 8]], content=bytes(16)), "'OBJECT'"),
        (packed([["y", "BYTES", [3], 8]], content=bytes(16)), "2 strings for shape"),
        (packed([["y", "BYTES", [1], 6]], content=bytes(16)), "incomplete string length"),
        (packed([["y", "FP32", [4], 16]]), "runs past the end"),
        (packed([], {"p": [1]}), "its parameters are not strings, numbers and booleans by name"),
        (packed([], {"p": 1 << 63}), "parameter 'p' is an integer of more than 64 bits"),
        (packed([], {"p": -(1 << 64)}), "parameter 'p' is an integer of more than 64 bits"),
        (packed([], {"p": "\ud800"}), "parameter 'p' has half of a surrogate pair"),
        (packed([], {"\udfff": 1}), r"parameter '\\udfff' has half of a surrogate pair"),
        (packed([[]]), "unpack"),
        (b"HRC1" + (100_000).to_bytes(4, "little") + b"[" * 100_000, "not a packed response"),
    ],
)
def test_malformed_bytes_are_refused_with_the_reason(data: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        unpack_response(data)
