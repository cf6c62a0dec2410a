"""The arguments that pb_utils accepts, and those that it refuses.

The tables have the results of a real Triton 2.51 for the same calls, except for the rows marked as ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils

if TYPE_CHECKING:
    from tests.backends.python.utils.conftest import FunctionServices

TEXTS = [b"x", bytearray(b"x"), np.str_("x"), np.bytes_(b"x"), "x"]
NO_TEXTS: list[Any] = [None, 1, 1.0, True, np.int64(1), ["x"], ("x",), {"x": 1}, memoryview(b"x"), np.array(["x"])]
ONES = [1, True, np.int64(1), np.uint8(1), np.float32(1.5), np.bool_(True), np.array(1), np.array([1]), np.array([[1]])]
NO_INTEGERS: list[Any] = [None, 1.0, np.float64(1.0), "1", b"1", [1], {}, 1 << 64, -1 - (1 << 63)]


def made(**arguments: Any) -> pb_utils.InferenceRequest:
    defaults = {"inputs": [pb_utils.Tensor("x", np.zeros(1))], "requested_output_names": ["y"], "model_name": "double"}
    return pb_utils.InferenceRequest(**{**defaults, **arguments})


def error(message: Any) -> str:
    return pb_utils.TritonError(message).message()


@pytest.mark.parametrize(
    "read",
    [
        lambda text: pb_utils.Tensor(text, np.zeros(1)).name(),
        lambda text: pb_utils.Tensor.from_dlpack(text, np.zeros(1)).name(),
        lambda text: made(request_id=text).request_id(),
        lambda text: made(model_name=text).model_name(),
        lambda text: made(requested_output_names=[text]).requested_output_names().pop(),
        error,
    ],
)
def test_bytes_and_numpys_text_are_text(read: Callable[[Any], str]) -> None:
    for text in TEXTS:
        assert (read(text), type(read(text))) == ("x", str)
    for other in NO_TEXTS:
        with pytest.raises(TypeError, match=r"must be|needs inputs"):
            read(other)


def test_bytes_that_are_no_text_are_refused_where_the_server_needs_text() -> None:
    for make in (lambda: pb_utils.Tensor(b"\xff", np.zeros(1)), lambda: made(model_name=b"\xff")):
        with pytest.raises(UnicodeDecodeError):
            make()
    assert error(b"a\xff") == "a\\xff"


@pytest.mark.parametrize(
    ("read", "smallest", "largest"),
    [
        (lambda value: made(timeout=value).timeout(), 0, (1 << 64) - 1),
        (lambda value: made(flags=value).flags(), 0, (1 << 32) - 1),
        (lambda value: made(model_version=value).model_version(), None, (1 << 63) - 1),
    ],
)
def test_whole_numbers_of_any_make_are_numbers(read: Callable[[Any], int], smallest: int | None, largest: int) -> None:
    for one in ONES:
        assert (read(one), type(read(one))) == (1, int)
    for other in NO_INTEGERS:
        with pytest.raises(TypeError, match="must be"):
            read(other)
    assert read(largest) == largest
    with pytest.raises(TypeError, match=f"to {largest}, found {largest + 1}"):
        read(largest + 1)
    if smallest is not None:
        with pytest.raises(TypeError, match="found -1"):
            read(-1)


def test_set_flags_takes_the_same() -> None:
    request = made()
    request.set_flags(np.int64(2))
    assert (request.flags(), type(request.flags())) == (2, int)
    for method in (request.set_flags, request.set_release_flags):
        with pytest.raises(TypeError):
            method(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "expected"), [(7, 7), (True, 1), ("s", "s"), (np.str_("s"), "s"), (np.int64(7), 7)])
def test_a_correlation_id_is_an_integer_or_a_text(value: Any, expected: int | str) -> None:
    """NumPy's integers are ours: Triton refuses them."""
    found = made(correlation_id=value).correlation_id()
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("value", [1.0, b"x", [1], np.float32(1), np.array([1])])
def test_any_other_correlation_id_is_refused(value: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^Correlation ID must be integer or string$"):
        made(correlation_id=value)
    with pytest.raises(TypeError):
        made(correlation_id=None)


@pytest.mark.parametrize(
    "arguments",
    [
        {"inputs": None},
        {"inputs": ""},
        {"inputs": {}},
        {"inputs": [1]},
        {"inputs": iter([])},
        {"requested_output_names": None},
        {"requested_output_names": [None]},
        {"requested_output_names": [1]},
        {"requested_output_names": "y"},
        {"requested_output_names": {"y"}},
        {"requested_output_names": (name for name in ["y"])},
        {"preferred_memory": 1},
        {"trace": "x"},
    ],
)
def test_invalid_arguments_are_a_type_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        made(**arguments)


def test_names_and_inputs_may_be_any_sequence() -> None:
    tensor = pb_utils.Tensor("x", np.zeros(1))
    request = made(inputs=(tensor,), requested_output_names=np.array(["a", "b"]))
    assert request.inputs() == [tensor]
    assert request.requested_output_names() == {"a", "b"}
    assert {type(name) for name in request.requested_output_names()} == {str}


@pytest.mark.parametrize("parameters", [[], (), "", 0, False, [("a", 1)]])
def test_parameters_are_a_dict_or_none(parameters: Any) -> None:
    for make in (lambda: made(parameters=parameters), lambda: pb_utils.InferenceResponse([], parameters=parameters)):
        with pytest.raises(pb_utils.TritonModelException, match=r"^Expect N8pybind114dictE, got"):
            make()


@pytest.mark.parametrize("code", [None, "INTERNAL", 8, -1, 1.0])
def test_a_code_is_one_of_the_eight(code: Any) -> None:
    with pytest.raises(TypeError, match="the code of a TritonError must be"):
        pb_utils.TritonError("m", code)


def test_preferred_memory_is_a_kind_and_a_device() -> None:
    pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, np.int64(0))
    for arguments in ((None,), ("GPU",), (pb_utils.TRITONSERVER_MEMORY_CPU, "0")):
        with pytest.raises(TypeError):
            pb_utils.PreferredMemory(*arguments)


@pytest.mark.usefixtures("runtime")
def test_models_may_be_named_in_bytes(services: FunctionServices) -> None:
    pb_utils.load_model(b"m", b"{}", {b"file:1/model.py": b"x"})
    assert services.loaded == {"m": ("{}", {"file:1/model.py": b"x"})}
    assert pb_utils.is_model_ready(b"m", b"1")
    pb_utils.unload_model(b"m", np.bool_(True))  # type: ignore[arg-type]
    assert not pb_utils.is_model_ready("m")


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize(
    "call",
    [
        lambda: pb_utils.is_model_ready("m", 1),  # type: ignore[arg-type]
        lambda: pb_utils.is_model_ready(None),  # type: ignore[arg-type]
        lambda: pb_utils.load_model(None),  # type: ignore[arg-type]
        lambda: pb_utils.load_model("m", {"backend": "python"}),  # type: ignore[arg-type]
        lambda: pb_utils.unload_model(1),  # type: ignore[arg-type]
        lambda: pb_utils.unload_model("m", None),  # type: ignore[arg-type]
        lambda: pb_utils.unload_model("m", "no"),  # type: ignore[arg-type]
    ],
)
def test_a_name_of_another_type_is_a_type_error(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="must be"):
        call()


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("files", [1, [], "x", {"x"}])
def test_files_are_a_dict(files: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="files should be a dictionary of file paths and file"):
        pb_utils.load_model("m", files=files)


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("decoupled", [None, "no", [], b""])
def test_decoupled_is_a_bool(decoupled: Any) -> None:
    with pytest.raises(TypeError, match="decoupled must be a bool"):
        made().exec(decoupled)


@pytest.mark.parametrize("kind", [None, "nonsense", 1, object()])
def test_types_that_numpy_lacks_have_no_number(kind: Any) -> None:
    assert pb_utils.numpy_to_triton_type(kind) is None


def test_a_config_that_was_not_parsed_is_a_type_error() -> None:
    for find in (pb_utils.get_input_config_by_name, pb_utils.get_output_config_by_name):
        with pytest.raises(TypeError, match=r"json\.loads"):
            find('{"input": []}', "x")  # type: ignore[arg-type]
