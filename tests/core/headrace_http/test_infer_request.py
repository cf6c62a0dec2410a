"""Requests whose JSON was read before. The oracle is a frontend that reads its first request."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages import dtypes
from headrace.messages.request import InferRequest
from headrace.messages.tensor import BytesTensor
from headrace_http import inference
from headrace_http.infer_request import BodyLayoutCache, DecodedBody, decode
from headrace_http.message import HttpRequest
from headrace_http.outputs import JSON
from headrace_http.request_layouts import RequestLayout

MakeCaller = Callable[..., Any]
FIXED = [datatype for datatype in dtypes.ALL if datatype is not dtypes.BYTES]
X4 = {"X": ("UINT8", (-1,))}


def binary(name: str, datatype: str, shape: Sequence[int], size: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "parameters": {"binary_data_size": size}}


FOUR = {"inputs": [binary("X", "UINT8", [4], 4)]}
#: So often JSON is read before it is known.
READ = 2


class Decoded:
    """Counts the bodies whose JSON is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def count(*arguments: Any) -> Any:
            self.count += 1
            return decode(*arguments)

        monkeypatch.setattr(inference, "decode", count)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decoded:
    return Decoded(monkeypatch)


def contents(tensor: Any) -> bytes:
    return tensor.tobytes() if isinstance(tensor, np.ndarray) else bytes(tensor.buffer)


def meaning(request: InferRequest) -> Any:
    """Return the part of ``request`` that a model can read."""
    inputs = [
        (name, type(tensor), getattr(tensor, "dtype", None), tensor.shape, contents(tensor))
        for name, tensor in request.inputs.items()
    ]
    return (
        inputs,
        list(request.outputs),
        dict(request.parameters),
        request.id,
        request.model_name,
        request.model_version,
        request.priority,
        request.timeout_us,
        (type(request.sequence_id), request.sequence_id, request.sequence_start, request.sequence_end),
    )


def outcome(caller: Any, request: object, tensors: bytes, headers: Any = None) -> Any:
    """The whole reply, and what the model got if it got anything."""
    caller.model.requests.clear()
    reply, body = caller.infer(request, tensors, headers)
    assert b"inside the server" not in body
    return reply.status, list(reply.headers), body, [meaning(found) for found in caller.model.requests]


def assert_same(make: Callable[[], Any], request: object, *tensors: bytes, headers: Any = None) -> None:
    """Each of ``tensors`` in turn has the outcome that it has as a first request."""
    caller = make()
    for data in tensors:
        assert outcome(caller, request, data, headers) == outcome(make(), request, data, headers)


# ---------------------------------------------------------------------------------------- cached layouts


@pytest.mark.parametrize("datatype", FIXED, ids=str)
def test_tensors_of_every_fixed_size_are_found_again(
    make_caller: MakeCaller, decoded: Decoded, datatype: dtypes.DataType
) -> None:
    caller = make_caller({"X": (datatype.name, (-1, 2))})
    size = 6 * datatype.itemsize
    request = {"inputs": [binary("X", datatype.name, [3, 2], size)], "parameters": {"binary_data_output": True}}
    for fill in (0, 1, 0, 1):
        reply, body = caller.infer(request, bytes([fill]) * size)
        assert reply.status == 200, body
        assert body.endswith(bytes([fill]) * size)
        (found,) = caller.model.requests[-1].inputs.values()
        assert (found.dtype, found.shape) == (datatype.numpy, (3, 2))
    assert decoded.count == READ


def test_each_of_several_inputs_is_found_where_it_lies(make_caller: MakeCaller, decoded: Decoded) -> None:
    caller = make_caller({"A": ("INT8", (-1,)), "B": ("FP64", (-1,)), "C": ("INT16", (-1,))})
    request = {"inputs": [binary("C", "INT16", [2], 4), binary("A", "INT8", [1], 1), binary("B", "FP64", [1], 8)]}
    for seed in range(3):
        c, a, b = np.array([seed, -seed], "<i2"), np.array([seed], "i1"), np.array([seed / 3], "<f8")
        assert caller.infer(request, c.tobytes() + a.tobytes() + b.tobytes())[0].status == 200
        inputs = caller.model.requests[-1].inputs
        assert list(inputs) == ["C", "A", "B"]
        assert [inputs[name].tolist() for name in "CAB"] == [c.tolist(), a.tolist(), b.tolist()]
    assert decoded.count == READ


def test_input_is_a_view_on_its_own_body(make_caller: MakeCaller, decoded: Decoded) -> None:
    caller = make_caller(X4)
    for data in (b"abcd", b"efgh", b"ijkl"):
        caller.infer(FOUR, data)
    _, second, third = (request.inputs["X"] for request in caller.model.requests)
    assert (second.tobytes(), third.tobytes()) == (b"efgh", b"ijkl")
    assert isinstance(third.base, bytes)
    assert third.base.endswith(b"}]}ijkl")
    assert decoded.count == READ


def test_outputs_classes_and_their_labels_are_remembered(make_caller: MakeCaller, decoded: Decoded) -> None:
    def make() -> Any:
        caller = make_caller({"X": ("FP32", (3,)), "Y": ("INT8", (1,))})
        caller.model.labels["X"] = ["cat", "dog"]
        return caller

    tensors = [np.array(row, "<f4").tobytes() + b"\x07" for row in ([1, 2, 3], [9, 1, 4], [0, 8, 0])]
    inputs = [binary("X", "FP32", [3], 12), binary("Y", "INT8", [1], 1)]
    for outputs in (
        [{"name": "Y"}],
        [{"name": "Y", "parameters": {"binary_data": True}}, {"name": "X"}],
        [{"name": "X", "parameters": {"classification": 2}}],
        [{"name": "X", "parameters": {"classification": 1, "binary_data": True}}],
    ):
        decoded.count = 0
        assert_same(make, {"inputs": inputs, "outputs": outputs}, *tensors)
        assert decoded.count == READ + len(tensors)  # by the caller, and by each that is new


def test_parameters_priority_and_timeout_are_remembered(make_caller: MakeCaller, decoded: Decoded) -> None:
    parameters = {"priority": 3, "timeout": 9, "a": "b", "i": 1, "d": 1.5, "yes": True, "binary_data_output": True}
    assert_same(lambda: make_caller(X4), {**FOUR, "parameters": parameters}, b"abcd", b"efgh", b"ijkl")
    parameters = {"priority": 2, "timeout": 5, "binary_data_output": False}
    assert_same(lambda: make_caller(X4), {**FOUR, "parameters": parameters}, b"abcd", b"efgh", b"ijkl")
    assert decoded.count == 2 * (READ + 3)


@pytest.mark.parametrize(
    "parameters",
    [
        {"sequence_id": 7},
        {"sequence_id": "s"},
        {"sequence_id": ""},
        {"sequence_start": True},
        {"sequence_end": True},
        {"sequence_id": 7, "sequence_start": True, "sequence_end": True, "a": 1},
    ],
)
def test_sequence_of_a_request_is_remembered(
    make_caller: MakeCaller, decoded: Decoded, parameters: dict[str, Any]
) -> None:
    assert_same(lambda: make_caller(X4), {**FOUR, "parameters": parameters}, b"abcd", b"efgh", b"ijkl")
    assert decoded.count == READ + 3


def test_each_request_has_its_own_parameters(make_caller: MakeCaller, decoded: Decoded) -> None:
    caller = make_caller(X4)
    for _ in range(3):
        caller.infer({**FOUR, "parameters": {"a": 1}}, b"abcd")
        assert caller.model.requests[-1].parameters == {"a": 1}
        caller.model.requests[-1].parameters["a"] = 2
    assert decoded.count == READ


def test_requests_without_parameters_share_none(make_caller: MakeCaller) -> None:
    caller = make_caller(X4)
    for _ in range(3):
        caller.infer(FOUR, b"abcd")
        assert caller.model.requests[-1].parameters == {}
        caller.model.requests[-1].parameters["a"] = 2


def test_forwarded_headers_are_those_of_each_request(make_caller: MakeCaller, decoded: Decoded) -> None:
    caller = make_caller(X4, http_header_forward_pattern="my_.*")
    for value in ("v", "w", "v"):
        caller.infer({**FOUR, "parameters": {"a": 1}}, b"abcd", {"My_Key": value})
        assert caller.model.requests[-1].parameters == {"a": 1, "My_Key": value}
    caller.infer({**FOUR, "parameters": {"a": 1}}, b"abcd")
    assert caller.model.requests[-1].parameters == {"a": 1}
    assert decoded.count == READ


def test_reshape_of_one_model_does_not_reach_the_next_request(make_caller: MakeCaller, decoded: Decoded) -> None:
    caller = make_caller({"X": ("UINT8", (4,))})
    caller.model.config.input[0].reshape.shape.extend([2, 2])
    caller.model.signature = type(caller.model.signature)("echo", caller.model.config)
    caller.table.serve(caller.model)
    for _ in range(3):
        assert caller.infer(FOUR, b"abcd")[0].status == 200
        assert caller.model.requests[-1].inputs["X"].shape == (2, 2)
    assert decoded.count == READ


def test_layout_says_nothing_of_the_model(make_caller: MakeCaller, decoded: Decoded) -> None:
    """The same JSON to two models: one takes it, the other refuses it in its own name."""
    one = make_caller(X4)
    one.table.serve(one.model, type(one.model)({"X": ("INT8", (4,))}, name="other"))
    text = orjson.dumps(FOUR)
    headers = {"Inference-Header-Content-Length": str(len(text))}
    for name, data, status in (("echo", b"abcd", 200), ("other", b"efgh", 400), ("echo", b"ijkl", 200)):
        reply, body = one.send("POST", f"/v2/models/{name}/infer", text + data, headers)
        assert reply.status == status
        assert (b"model 'other'" in body) == (name == "other")
    assert [request.model_name for request in one.model.requests] == ["echo", "echo"]
    assert decoded.count == READ


def test_strings_of_the_same_length_are_found_again(make_caller: MakeCaller, decoded: Decoded) -> None:
    def make() -> Any:
        return make_caller({"S": ("BYTES", (-1,))})

    request = {"inputs": [binary("S", "BYTES", [2], 11)]}
    assert_same(
        make, request, b"\1\0\0\0a\2\0\0\0bc", b"\2\0\0\0ab\1\0\0\0c", b"\7\0\0\0abcdefg", b"\1\0\0\0a\2\0\0\0bc"
    )
    assert decoded.count == READ + 4


def test_strings_beside_numbers_are_found_where_they_lie(make_caller: MakeCaller, decoded: Decoded) -> None:
    def make() -> Any:
        return make_caller({"X": ("INT16", (-1,)), "S": ("BYTES", (-1,)), "Y": ("UINT8", (-1,))})

    request = {"inputs": [binary("Y", "UINT8", [1], 1), binary("S", "BYTES", [1], 6), binary("X", "INT16", [2], 4)]}
    assert_same(make, request, *(b"%c\2\0\0\0a%cb%cc%c" % (n, n, n, n) for n in range(65, 69)))
    assert decoded.count == READ + 4


def test_requests_with_ids_of_their_own_are_found_again(make_caller: MakeCaller, decoded: Decoded) -> None:
    caller = make_caller(X4)
    ids = ["1", "2", "a longer one", "", "1", "x" * 900, "'{}[]:,"]
    for number, name in enumerate(ids):
        reply, body = caller.infer({"id": name, **FOUR}, b"%04d" % number)
        assert reply.status == 200
        assert orjson.loads(body).get("id", "") == name
        assert caller.model.requests[-1].id == name
        assert caller.model.requests[-1].inputs["X"].tobytes() == b"%04d" % number
    assert decoded.count == READ


# ---------------------------------------------------------------------------------------- requests without a layout


def test_request_with_an_id_behind_its_inputs_is_read_each_time(make_caller: MakeCaller, decoded: Decoded) -> None:
    assert_same(lambda: make_caller(X4), {**FOUR, "id": "1"}, b"abcd", b"efgh", b"ijkl")
    assert decoded.count == 6


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "\u00e9", "\x7f"])
def test_id_that_needs_a_parser_is_read_each_time(make_caller: MakeCaller, decoded: Decoded, name: str) -> None:
    assert_same(lambda: make_caller(X4), {"id": name, **FOUR}, b"abcd", b"efgh", b"ijkl")
    assert decoded.count == 6


@pytest.mark.parametrize("front", ['{"id":"%s","id":"2",', '{"id":"%s","\\u0069d":"2",', '{"id":"%s" , "id": "2",'])
def test_second_id_is_the_one_that_counts_each_time(make_caller: MakeCaller, front: str) -> None:
    caller = make_caller(X4)
    for name in ("2", "2", "2", "3", "2"):
        text = (front % name).encode() + orjson.dumps(FOUR)[1:]
        headers = {"Inference-Header-Content-Length": str(len(text))}
        assert caller.send("POST", "/v2/models/echo/infer", text + b"abcd", headers)[0].status == 200
        assert caller.model.requests[-1].id == "2"


@pytest.mark.parametrize("front", [b'{"id":"1', b'{"id":"1\n",', b'{"id":"\xff",', b'{"id":"', b'{"id":"1"'])
def test_invalid_json_after_known_json_is_refused(make_caller: MakeCaller, front: bytes) -> None:
    caller = make_caller(X4)
    for _ in range(READ + 1):
        assert caller.infer({"id": "1", **FOUR}, b"abcd")[0].status == 200
        text = front + orjson.dumps(FOUR)[1:]
        headers = {"Inference-Header-Content-Length": str(len(text))}
        assert caller.send("POST", "/v2/models/echo/infer", text + b"abcd", headers)[0].status == 500


@pytest.mark.parametrize(
    "inputs",
    [
        [binary("X", "UINT8", [0], 0), binary("Y", "UINT8", [4], 4)],
        [binary("X", "UINT8", [4], 4), binary("Y", "UINT8", [0], 0)],
        [binary("X", "UINT8", [4], 4), {"name": "Y", "datatype": "UINT8", "shape": [4], "data": [1, 2, 3, 4]}],
        [{"name": "X", "datatype": "UINT8", "shape": [1], "data": [1]}, binary("Y", "UINT8", [4], 4)],
        [{"name": "X", "datatype": "UINT8", "shape": [0], "data": []}, binary("Y", "UINT8", [4], 4)],
    ],
)
def test_empty_tensors_and_those_in_json_are_read_each_time(
    make_caller: MakeCaller, decoded: Decoded, inputs: list[Any]
) -> None:
    assert_same(
        lambda: make_caller({"X": ("UINT8", (-1,)), "Y": ("UINT8", (-1,))}), {"inputs": inputs}, b"abcd", b"efgh"
    )
    assert decoded.count == 4


def test_json_alone_is_read_each_time(make_caller: MakeCaller, decoded: Decoded) -> None:
    request = {"inputs": [{"name": "X", "datatype": "UINT8", "shape": [2], "data": [1, 2]}]}
    assert_same(lambda: make_caller(X4), request, b"", b"")
    assert_same(lambda: make_caller(X4), {"inputs": []}, b"", b"")
    assert decoded.count == 8


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (3, "unexpected size for input 'X', expecting 1 additional bytes for model 'echo'"),
        (1, "unexpected size for input 'X', expecting 3 additional bytes for model 'echo'"),
        (5, "unexpected additional input data for model 'echo'"),
        (8, "unexpected additional input data for model 'echo'"),
    ],
)
def test_known_json_before_too_many_or_too_few_bytes_is_refused_as_before(
    make_caller: MakeCaller, size: int, text: str
) -> None:
    caller = make_caller(X4)
    for _ in range(2):
        assert caller.infer(FOUR, b"abcd")[0].status == 200
        reply, body = caller.infer(FOUR, b"x" * size)
        assert (reply.status, orjson.loads(body)) == (400, {"error": text})
    assert [request.inputs["X"].tobytes() for request in caller.model.requests] == [b"abcd"] * 2


@pytest.mark.parametrize(
    ("inputs", "size"),
    [
        ([binary("X", "UINT8", [5], 4)], 4),
        ([binary("X", "FP31", [4], 4)], 4),
        ([binary("X", "UINT8", [4], 2), binary("X", "UINT8", [2], 2)], 4),
        ([binary("X", "UINT8", [4], 3)], 4),
        ([binary("Z", "UINT8", [4], 4)], 4),
        ([binary("X", "UINT8", [2, 2], 4)], 4),
    ],
)
def test_refusal_is_the_same_each_time(make_caller: MakeCaller, inputs: list[Any], size: int) -> None:
    assert_same(lambda: make_caller(X4), {"inputs": inputs}, *[b"x" * size] * 3)


def test_same_json_and_another_length_of_it_are_two_layouts(make_caller: MakeCaller) -> None:
    """A space after the JSON belongs to the JSON or to the tensor, by the header."""
    caller, text = make_caller(X4), orjson.dumps(FOUR)
    for _ in range(2):
        for json_bytes, data in ((len(text), b" abc"), (len(text) + 1, b"abcd")):
            body = text.ljust(json_bytes) + data
            headers = {"Inference-Header-Content-Length": str(json_bytes)}
            assert caller.send("POST", "/v2/models/echo/infer", body, headers)[0].status == 200
            assert caller.model.requests[-1].inputs["X"].tobytes() == data


# ---------------------------------------------------------------------------------------- any request at all

_GOOD = [binary("X", "UINT8", [4], 4), binary("Y", "INT16", [1], 2)]
_odd = st.builds(
    lambda name, datatype, count, extra: binary(name, datatype, [count], extra + count),
    st.sampled_from("XYZ"),
    st.sampled_from(("UINT8", "INT16", "BOOL", "BYTES", "FP16")),
    st.integers(0, 6),
    st.sampled_from((0, 0, 0, 4)),
)
_inputs = st.one_of(st.just(_GOOD), st.just(_GOOD[::-1]), st.lists(_odd | st.sampled_from(_GOOD), max_size=3))
_documents = st.fixed_dictionaries(
    {"inputs": _inputs},
    optional={
        "id": st.sampled_from(("", "7", "8", 'a"b', "\u00e9", 7)),
        "outputs": st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from("XYZ")},
                optional={"parameters": st.sampled_from(({"binary_data": True}, {"classification": 1}, {}))},
            ),
            max_size=2,
        ),
        "parameters": st.fixed_dictionaries(
            {},
            optional={
                "sequence_id": st.sampled_from((0, 1, "", "s")),
                "sequence_start": st.booleans(),
                "sequence_end": st.booleans(),
                "priority": st.integers(0, 2),
                "timeout": st.integers(0, 2),
                "binary_data_output": st.booleans(),
                "custom": st.sampled_from((1, 1.5, True, "s")),
            },
        ),
    },
)


def id_first(document: dict[str, Any]) -> dict[str, Any]:
    return {"id": document["id"], **document} if "id" in document else document


@given(
    documents=st.lists(_documents | _documents.map(id_first), min_size=1, max_size=2),
    bodies=st.lists(st.tuples(st.integers(0, 1), st.binary(max_size=12)), min_size=2, max_size=8),
)
@settings(max_examples=200, deadline=None)
def test_memory_changes_no_outcome(make_caller: MakeCaller, documents: list[Any], bodies: list[Any]) -> None:
    def make() -> Any:
        return make_caller({"X": ("UINT8", (-1,)), "Y": ("INT16", (-1,))})

    caller = make()
    for which, data in bodies:
        document = documents[which % len(documents)]
        wanted = sum(entry["parameters"]["binary_data_size"] for entry in document["inputs"])
        for tensors in (data, data.ljust(wanted, b"\0")[:wanted]):
            assert outcome(caller, document, tensors) == outcome(make(), document, tensors)


# ---------------------------------------------------------------------------------------- bounds


def layout_of(number: int, padding: int = 0) -> tuple[memoryview, int]:
    text = orjson.dumps({"n": number}).ljust(padding)
    return memoryview(text + b"abcd"), len(text)


def keep(known: BodyLayoutCache, body: memoryview, json_bytes: int) -> None:
    request = InferRequest("m", {"X": np.ndarray((4,), np.uint8, body, json_bytes)})
    for _ in range(READ):
        layout, request_id, rest = known.find(body, json_bytes)
        if layout is None and rest:
            known.keep(request_id, rest, DecodedBody(request, {}, JSON), 4)


def is_known(known: BodyLayoutCache, body: memoryview, json_bytes: int) -> bool:
    return known.find(body, json_bytes)[0] is not None


@pytest.mark.parametrize(
    ("tensor", "is_noticed"), [(np.zeros(4, np.uint8), True), (BytesTensor(b"\1\0\0\0a", (1,)), False)]
)
def test_requests_alike_are_said_to_be_unless_there_are_strings(tensor: Any, is_noticed: bool) -> None:
    layout = RequestLayout.of(InferRequest("m", {"X": tensor}))
    assert layout is not None
    found = [layout.request("m", "", name, memoryview(bytes(8))).alike for name in ("a", "b")]
    assert found[0] is found[1]
    assert (found[0] is not None) == is_noticed


def test_number_of_layouts_is_bounded_and_the_latest_is_known() -> None:
    known = BodyLayoutCache()
    for number in range(3000):
        keep(known, *layout_of(number))
        assert is_known(known, *layout_of(number))
    assert sum(is_known(known, *layout_of(number)) for number in range(3000)) <= 1024


def test_layout_used_once_is_not_cached() -> None:
    known = BodyLayoutCache()
    keep(known, *layout_of(0))
    for number in range(1, 10_000):
        _, request_id, rest = known.find(*layout_of(number))
        known.keep(request_id, rest, DecodedBody(InferRequest("m", {}), {}, JSON), 4)
    assert is_known(known, *layout_of(0))


def test_long_json_is_not_kept() -> None:
    known = BodyLayoutCache()
    for size in (1024, 1025):
        keep(known, *layout_of(1, size))
    assert is_known(known, *layout_of(1, 1024))
    assert not is_known(known, *layout_of(1, 1025))


def test_long_json_is_not_even_copied() -> None:
    known, (body, json_bytes) = BodyLayoutCache(), layout_of(1, 2**20)
    tracemalloc.start()
    try:
        keep(known, body, json_bytes)
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


def test_body_is_not_kept_with_its_layout(make_caller: MakeCaller) -> None:
    class Body(bytearray):
        """Bytes that can be watched."""

    caller, text = make_caller(X4), orjson.dumps(FOUR)
    headers = {b"inference-header-content-length": b"%d" % len(text)}
    gc.disable()
    try:
        for _ in range(3):
            body = Body(text + b"abcd")
            caller.routes.dispatch(
                HttpRequest("POST", "/v2/models/echo/infer", headers, memoryview(body)), lambda reply: None
            )
            (body_ref,) = [weakref.ref(body)]
            caller.model.requests.clear()
            del body
            assert body_ref() is None
    finally:
        gc.enable()
