"""Keys: which requests have the same key, and which do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.caches import keys
from headrace.caches.keys import CacheKeys
from headrace.messages.request import InferRequest
from headrace.messages.tensor import BytesTensor


def key(inputs: dict[str, Any], outputs: tuple[str, ...] = (), identity: bytes = b"m", **parameters: Any) -> bytes:
    return CacheKeys(identity, ["y", "z"]).key(InferRequest("m", inputs, outputs, parameters=parameters))


A, B = np.arange(6, dtype=np.float32), np.arange(4, dtype=np.int64)

DIFFERENT = [
    key({"a": A}),
    key({"b": A}),
    key({"a": A.reshape(2, 3)}),
    key({"a": A.view(np.int32)}),
    key({"a": A.view(np.int64)}),
    key({"a": A + 1}),
    key({"a": A, "b": B}),
    key({"a": B, "b": A}),
    key({}),
    key({"a": A}, ("y",)),
    key({"a": A}, ("z",)),
    key({"a": A}, mood=1),
    key({"a": A}, mood=True),
    key({"a": A}, mood="1"),
    key({"a": A}, mood=1.0),
    key({"a": A}, identity=b"n"),
    key({"a": BytesTensor.from_items([b"xy", b"z"], (2,))}),
    key({"a": BytesTensor.from_items([b"x", b"yz"], (2,))}),
    key({"a": BytesTensor.from_items([b"xy", b"z"], (1, 2))}),
    key({"a": np.zeros((0, 4), np.float32)}),
    key({"a": np.zeros((0, 5), np.float32)}),
]


def test_whatever_could_change_an_answer_changes_the_key() -> None:
    assert len(set(DIFFERENT)) == len(DIFFERENT)
    assert {len(each) for each in DIFFERENT} == {32}


@pytest.mark.parametrize("is_fast", [False, True], ids=["without the extra", "with it"])
def test_large_tensors_have_different_keys_with_any_digest(monkeypatch: pytest.MonkeyPatch, is_fast: bool) -> None:
    pytest.importorskip("blake3")
    if not is_fast:
        monkeypatch.setattr(keys, "_LARGE_DIGEST", None)
    large = np.zeros(3000, np.float32)
    last, name = large.copy(), "a"
    last[-1] = 1
    digests = [
        key({name: large}),
        key({name: last}),
        key({name: large.reshape(3, 1000)}),
        key({name: large.view(np.int32)}),
        key({name: large, "b": last}),
        key({name: last, "b": large}),
        key({name: blake3_of(large)}),
        key({name: BytesTensor.from_items([bytes(6000), bytes(5992)], (2,))}),
        key({name: BytesTensor.from_items([bytes(5992), bytes(6000)], (2,))}),
    ]
    assert len(set(digests)) == len(digests)
    assert key({name: np.repeat(large, 2)[::2]}) == digests[0]
    if not is_fast:
        monkeypatch.undo()
        assert key({name: large}) != digests[0]  # so that this has tried both


def blake3_of(tensor: Any) -> Any:
    """Return the blake3 digest that replaces the bytes of a large tensor."""
    from blake3 import blake3

    return np.frombuffer(blake3(tensor.tobytes()).digest(), np.uint8)


def test_fields_without_influence_do_not_change_the_key() -> None:
    other = InferRequest("m", {"b": B, "a": A}, ("z", "y"), "id", "1", {}, 3, 500)
    assert CacheKeys(b"m", ["y", "z"]).key(other) == key({"a": A, "b": B})
    every_second = np.repeat(A, 2)[::2]
    assert not every_second.flags.c_contiguous
    assert key({"a": every_second}) == key({"a": A})


@pytest.mark.parametrize("big", [False, True])
def test_a_view_of_the_wire_and_an_array_are_one(big: bool) -> None:
    array = np.arange(5000 if big else 5, dtype=np.float64)
    assert key({"a": np.frombuffer(array.tobytes(), np.float64)}) == key({"a": array})


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.binary(max_size=6)), min_size=2, max_size=2, unique_by=lambda x: x[0]),
    st.lists(st.tuples(st.sampled_from("ab"), st.binary(max_size=6)), min_size=2, max_size=2, unique_by=lambda x: x[0]),
)
def test_bytes_never_run_from_one_input_into_another(one: Any, other: Any) -> None:
    first, second = ({name: np.frombuffer(data, np.uint8) for name, data in pairs} for pairs in (one, other))
    assert (key(first) == key(second)) == (dict(one) == dict(other))


def test_many_shapes_take_no_more_than_a_few() -> None:
    keys = CacheKeys(b"m", ["y"])
    for size in range(3000):
        keys.key(InferRequest("m", {"a": np.zeros(size, np.uint8)}))
    assert len(keys._headers) <= 1024
