"""The functions of pb_utils: data types, wire form, and look-ups by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

import triton_python_backend_utils as pb_utils
from headrace.errors import InvalidArgument

NUMBERS = {
    "TYPE_BOOL": (1, np.bool_),
    "TYPE_UINT8": (2, np.uint8),
    "TYPE_UINT16": (3, np.uint16),
    "TYPE_UINT32": (4, np.uint32),
    "TYPE_UINT64": (5, np.uint64),
    "TYPE_INT8": (6, np.int8),
    "TYPE_INT16": (7, np.int16),
    "TYPE_INT32": (8, np.int32),
    "TYPE_INT64": (9, np.int64),
    "TYPE_FP16": (10, np.float16),
    "TYPE_FP32": (11, np.float32),
    "TYPE_FP64": (12, np.float64),
    "TYPE_STRING": (13, np.object_),
}


@pytest.mark.parametrize(("name", "number", "kind"), [(name, *both) for name, both in NUMBERS.items()])
def test_three_spellings_of_a_type_agree(name: str, number: int, kind: type[Any]) -> None:
    assert pb_utils.triton_to_numpy_type(number) is kind
    assert pb_utils.triton_string_to_numpy(name) is (bool if name == "TYPE_BOOL" else kind)
    assert pb_utils.numpy_to_triton_type(kind) == pb_utils.numpy_to_triton_type(np.dtype(kind)) == number
    assert set(pb_utils.TRITON_STRING_TO_NUMPY) == set(NUMBERS)


def test_type_that_the_other_side_lacks_is_none() -> None:
    assert pb_utils.triton_to_numpy_type(14) is None
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_BF16")


@given(st.lists(st.binary(max_size=20) | st.text(max_size=20), min_size=1, max_size=10))
def test_wire_form_is_the_stock_clients(items: list[bytes | str]) -> None:
    array = np.empty(len(items), object)
    array[:] = items
    wire = pb_utils.serialize_byte_tensor(array)

    assert wire == serialize_byte_tensor(array).item()
    assert isinstance(wire, bytes)
    back = pb_utils.deserialize_bytes_tensor(wire)
    assert (back.dtype, back.ndim) == (np.dtype(object), 1)
    assert back.tolist() == deserialize_bytes_tensor(wire).tolist()


def test_wire_form_of_nothing_and_of_numbers() -> None:
    assert pb_utils.serialize_byte_tensor(np.array([], object)) == ()
    assert pb_utils.serialize_byte_tensor(np.array([1.0])) is None
    assert pb_utils.serialize_byte_tensor(np.array([b"ab", b"c"])) == b"\x02\0\0\0ab\x01\0\0\0c"
    assert pb_utils.deserialize_bytes_tensor(b"").tolist() == []
    assert pb_utils.deserialize_bytes_tensor(np.frombuffer(b"\x01\0\0\0a", np.uint8)).tolist() == [b"a"]


@pytest.mark.parametrize("wire", [b"\x01", b"\x05\0\0\0ab"])
def test_broken_wire_form_is_refused(wire: bytes) -> None:
    with pytest.raises(InvalidArgument):
        pb_utils.deserialize_bytes_tensor(wire)


def test_tensors_and_configs_are_found_by_name() -> None:
    a, b = (pb_utils.Tensor(name, np.zeros(1)) for name in "ab")
    request = pb_utils.InferenceRequest(inputs=[a, b], requested_output_names=[], model_name="m")
    response = pb_utils.InferenceResponse([a, b])
    config = {"input": [{"name": "a"}, {"name": "b"}], "output": [{"name": "c"}]}

    assert pb_utils.get_input_tensor_by_name(request, "b") is b
    assert pb_utils.get_input_tensor_by_name(request, "c") is None
    assert pb_utils.get_output_tensor_by_name(response, "a") is a
    assert pb_utils.get_output_tensor_by_name(response, "c") is None
    assert pb_utils.get_input_config_by_name(config, "b") == {"name": "b"}
    assert pb_utils.get_input_config_by_name(config, "c") is None
    assert pb_utils.get_output_config_by_name(config, "c") == {"name": "c"}
    assert pb_utils.get_output_config_by_name({}, "c") is None


@pytest.mark.parametrize(
    ("config", "decoupled"),
    [({}, False), ({"model_transaction_policy": {"decoupled": True}}, True), ({"model_transaction_policy": {}}, False)],
)
def test_decoupled_is_read_from_the_config(config: dict[str, Any], decoupled: bool) -> None:
    assert pb_utils.using_decoupled_model_transaction_policy(config) is decoupled
