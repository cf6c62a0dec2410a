"""Request checks against the texts of docs/spec/behaviours.md section 3.2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import Code, InvalidArgument
from headrace.messages.request import Undecoded
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import Ticket
from headrace.models.signature import Signature, explain
from tests.core.conftest import make_ticket

BATCHED = """
name: "m" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [3] } input { name: "s" data_type: TYPE_STRING dims: [-1] }
output { name: "y" data_type: TYPE_FP32 dims: [3] } output { name: "z" data_type: TYPE_FP32 dims: [3] }
"""
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def signature(text: str = BATCHED) -> Signature:
    config = text_format.Parse(text, ModelConfig())
    return Signature(config.name, config)


def ticket(outputs: tuple[str, ...] = (), id: str = "", **inputs: Any) -> Ticket:
    return make_ticket("m", inputs, outputs=outputs, id=id)


def x(*shape: int, dtype: type = np.float32) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype)


def s(*shape: int) -> BytesTensor:
    return BytesTensor.from_objects(np.full(shape, b"ab", object))


def undecoded(datatype: str, shape: tuple[int, ...], size: int) -> Undecoded:
    return Undecoded(datatype, shape, memoryview(bytes(size)))


def test_a_fitting_request_gets_its_rows_and_a_key_of_its_variable_dims() -> None:
    one, other = ticket(x=x(2, 3), s=s(2, 5)), ticket(x=x(1, 3), s=s(1, 6))
    for each in (one, other):
        signature().check(each)
    assert (one.rows, other.rows) == (2, 1)
    assert one.batch_key != other.batch_key


REFUSALS = [
    (ticket(("q",), x=x(1, 3), s=s(1, 1)), "unexpected inference output 'q' for model 'm'"),
    (ticket(("y", "y"), x=x(1, 3), s=s(1, 1)), "[request id: <id_unknown>] output 'y' already exists in request"),
    (
        ticket(x=x(1, 3)),
        "[request id: <id_unknown>] expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['x'], but missing "
        "required input(s) ['s']. Please provide all required input(s).",
    ),
    (ticket(x=x(1, 3), t=s(1, 1)), "unexpected inference input 't' for model 'm'"),
    (
        ticket(x=x(), s=s(1, 1)),
        "[request id: <id_unknown>] input 'x' has no shape but model requires batch dimension for 'm'",
    ),
    (
        ticket(x=x(1, 3), s=s(2, 1)),
        "[request id: <id_unknown>] input 'x' batch size does not match other inputs for 'm'",
    ),
    (ticket(x=x(5, 3), s=s(5, 1), id="7"), "[request id: 7] inference request batch-size must be <= 4 for 'm'"),
    (
        ticket(x=x(1, 3, dtype=np.int32), s=s(1, 1)),
        "[request id: <id_unknown>] inference input 'x' data-type is 'INT32', but model 'm' expects 'FP32'",
    ),
    (
        ticket(x=undecoded("FP32", (1, -1), 12), s=s(1, 1)),
        "[request id: <id_unknown>] All input dimensions should be specified for input 'x' for model 'm', got [1,-1]",
    ),
    (
        ticket(x=x(1, 4), s=s(1, 1)),
        "[request id: <id_unknown>] unexpected shape for input 'x' for model 'm'. Expected [-1,3], got [1,4]. " + NOTE,
    ),
    (
        ticket(x=undecoded("FP32", (1, 3), 11), s=s(1, 1)),
        "[request id: <id_unknown>] input byte size mismatch for input 'x' for model 'm'. Expected 12, got 11",
    ),
    (
        ticket(x=x(1, 3), s=BytesTensor(b"\x01\x00\x00\x00a\x01\x00", (1, 1))),
        "[request id: <id_unknown>] incomplete string length indicator for inference input 's' for model 'm', "
        "expecting 4 bytes but only 2 bytes available. Please make sure the string length indicator is in one buffer.",
    ),
    (
        ticket(x=x(1, 3), s=BytesTensor(bytes(8), (1, 1))),
        "[request id: <id_unknown>] unexpected number of string elements 2 for inference input 's' for model 'm', "
        "expecting 1",
    ),
    (
        ticket(x=x(1, 3), s=BytesTensor(bytes(8), (1, 3))),
        "[request id: <id_unknown>] expected 3 string elements for inference input 's' for model 'm', got 2",
    ),
]


@pytest.mark.parametrize(("bad", "text"), REFUSALS, ids=[text[:60] for _, text in REFUSALS])
def test_refusals_are_worded_as_triton_words_them(bad: Ticket, text: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        signature().check(bad)
    assert refusal.value.message == text
    assert refusal.value.code is Code.INVALID_ARGUMENT


def test_a_string_longer_than_the_data_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="longer than the data"):
        signature().check(ticket(x=x(1, 3), s=BytesTensor(b"\xff\xff\xff\x7fa", (1, 1))))


OPTIONAL = """
name: "m" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [1] }
input { name: "o" data_type: TYPE_FP32 dims: [1] optional: true } output { name: "y" data_type: TYPE_FP32 dims: [1] }
"""


def test_an_optional_input_may_be_left_out_and_requests_join_only_with_the_same_inputs() -> None:
    without, given_ = ticket(x=x(1, 1)), ticket(x=x(1, 1), o=x(1, 1))
    for each in (without, given_):
        signature(OPTIONAL).check(each)
    assert without.batch_key != given_.batch_key


def test_a_missing_required_input_is_named_even_if_the_number_of_inputs_is_valid() -> None:
    with pytest.raises(InvalidArgument, match=r"between 1 and 2 but got 1 .* required input\(s\) \['x'\]"):
        signature(OPTIONAL).check(ticket(o=x(1, 1)))


def test_a_reshape_replaces_the_shape_that_the_backend_sees_and_is_undone_for_the_client() -> None:
    reshaped = signature(
        'name: "m" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [1] reshape { shape: [] } } '
        'output { name: "y" data_type: TYPE_FP32 dims: [-1, 2] reshape { shape: [2, -1] } }'
    )
    one = ticket(x=x(2, 1))
    reshaped.check(one)
    assert one.request.inputs["x"].shape == (2,)
    assert reshaped.outputs["y"].undo_reshape((2, 7)) == (7, 2)


def test_zero_rows_and_zero_sized_dims_are_legal() -> None:
    one = ticket(x=x(0, 3), s=s(0, 2))
    signature().check(one)
    assert one.rows == 0


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.one_of(
    st.builds(lambda shape, dtype: np.zeros(shape, dtype), shapes, st.sampled_from([np.float32, np.int64])),
    shapes.map(lambda shape: s(*shape)),
    st.builds(lambda shape: undecoded("FP32", shape, 3), shapes),
)


@given(
    st.dictionaries(st.sampled_from(["x", "s", "t"]), tensors, max_size=3), st.lists(st.sampled_from("yzq"), max_size=2)
)
def test_the_fast_check_and_the_explanation_agree(inputs: dict[str, Any], outputs: list[str]) -> None:
    one = ticket(tuple(outputs), **inputs)
    unexplained = explain(signature(), one.request).message.endswith("request does not fit model 'm'")
    try:
        signature().check(one)
    except InvalidArgument:
        assert not unexplained
    else:
        assert unexplained


def test_a_message_lists_a_hundred_names_and_counts_the_rest() -> None:
    many = make_ticket(inputs={f"i{number}": x(1, 3) for number in range(130)})
    with pytest.raises(InvalidArgument, match=r"'i30' and 30 more\], but missing required input\(s\) \['x','s'\]"):
        signature().check(many)


SHAPED = """
name: "m" max_batch_size: 4 platform: "tensorrt_plan"
input { name: "x" data_type: TYPE_FP32 dims: [3] }
input { name: "shape" data_type: TYPE_INT32 dims: [2] is_shape_tensor: true }
output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""


def test_a_shape_tensor_has_no_batch_axis_and_joins_only_its_equals() -> None:
    model = signature(SHAPED)
    tickets = [
        ticket(x=x(rows, 3), shape=np.array(values, np.int32))
        for rows, values in ((2, [5, 6]), (1, [5, 6]), (2, [6, 5]))
    ]
    for each in (*tickets, reordered := ticket(shape=np.array([5, 6], np.int32), x=x(3, 3))):
        model.check(each)
    assert [each.rows for each in (*tickets, reordered)] == [2, 1, 2, 3]
    assert tickets[0].batch_key == tickets[1].batch_key == reordered.batch_key != tickets[2].batch_key


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (np.zeros((2, 2), np.int32), "unexpected shape for input 'shape' for model 'm'. Expected [2], got [2,2]. "),
        (np.zeros(3, np.int32), "unexpected shape for input 'shape' for model 'm'. Expected [2], got [3]. "),
        (np.zeros(2, np.int64), "inference input 'shape' data-type is 'INT64', but model 'm' expects 'INT32'"),
    ],
)
def test_an_invalid_shape_tensor_is_reported_without_a_batch_axis(shape: Any, reason: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        signature(SHAPED).check(ticket(x=x(2, 3), shape=shape))
    assert reason in refusal.value.message


def test_rows_beside_a_shape_tensor_are_still_bounded() -> None:
    with pytest.raises(InvalidArgument, match="batch-size must be <= 4"):
        signature(SHAPED).check(ticket(shape=np.zeros(2, np.int32), x=x(5, 3)))


PLAIN = """
name: "m" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""


def alike(token: object, **inputs: Any) -> Ticket:
    return make_ticket("m", inputs, alike=token)


def test_of_equal_layouts_one_request_is_checked() -> None:
    model, token = signature(PLAIN), object()
    first, second, other = alike(token, x=x(2, 3)), alike(token, x=x(2, 3)), alike(object(), x=x(1, 5))
    model.check(first)
    model._checks.clear()  # nothing could be checked any more
    model.check(second)
    assert (first.rows, first.batch_key) == (second.rows, second.batch_key) == (2, ("x", (3,)))
    with pytest.raises(InvalidArgument):
        model.check(other)


def test_refused_request_is_refused_again_in_the_same_form() -> None:
    model, token = signature(PLAIN), object()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="batch-size must be <= 4"):
            model.check(alike(token, x=x(5, 3)))


def test_requests_of_equal_layouts_are_checked_if_values_count_or_a_shape_is_replaced() -> None:
    shaped, token = signature(SHAPED), object()
    tickets = [alike(token, x=x(2, 3), shape=np.array(values, np.int32)) for values in ([5, 6], [6, 5])]
    for each in tickets:
        shaped.check(each)
    assert tickets[0].batch_key != tickets[1].batch_key
    replaced, token = signature(PLAIN.replace("dims: [-1] }", "dims: [6] reshape { shape: [2, 3] } }", 1)), object()
    for _ in range(2):
        each = alike(token, x=x(2, 6))
        replaced.check(each)
        assert each.request.inputs["x"].shape == (2, 2, 3)


def test_cache_of_valid_layouts_is_bounded() -> None:
    model = signature(PLAIN)
    for _ in range(1000):
        model.check(alike(object(), x=x(1, 3)))
    assert len(model._fitting) <= 256


def test_a_request_that_was_altered_is_like_no_other() -> None:
    request = alike(object(), x=x(1, 3)).request
    assert request.alike is not None
    assert request.with_inputs({"x": x(2, 3)}).alike is request.with_outputs(["y"]).alike is None
