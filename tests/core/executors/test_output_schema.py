"""The parts of a response that reach the caller."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from headrace.errors import BackendError
from headrace.executors.output_schema import OutputSchema
from headrace.messages import dtypes
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.spec import Spec

SCHEMA = OutputSchema("m", "3", {"y": Spec("y", dtypes.FP32, (-1,)), "z": Spec("z", dtypes.FP32, (1,))}, True)
ONE = np.zeros((1, 1), np.float32)


def request(*outputs: str) -> InferRequest:
    return InferRequest("m", {}, outputs)


def test_an_output_that_was_not_requested_is_dropped_even_if_the_config_lacks_it() -> None:
    signed = SCHEMA.sign(request("y", "z"), InferResponse({"debug": ONE, "y": ONE}))
    assert list(signed.outputs) == ["y"]


def test_a_requested_output_may_be_absent() -> None:
    assert list(SCHEMA.sign(request("z"), InferResponse({"y": ONE})).outputs) == []


def test_a_response_of_unknown_outputs_only_is_an_error_with_one_of_them_and_the_known_names() -> None:
    with pytest.raises(BackendError, match=r"output 'q', but the config has only \['y', 'z'\]"):
        SCHEMA.sign(request("y"), InferResponse({"q": ONE}))


RESHAPED = OutputSchema("m", "3", {"y": Spec("y", dtypes.FP32, (1,), reshape=())}, True)


def test_the_reshape_of_the_config_is_undone_for_the_client() -> None:
    signed = RESHAPED.sign(request(), InferResponse({"y": np.zeros(3, np.float32)}))
    assert signed.outputs["y"].shape == (3, 1)


def test_a_shape_that_the_reshape_does_not_fit_is_an_error_with_both() -> None:
    answer = RESHAPED.signed(request(), InferResponse({"y": np.zeros((3, 4), np.float32)}))
    assert isinstance(answer, BackendError)
    assert answer.message == (
        "model 'm': output 'y' has shape [3, 4], which does not fit the reshape of the config, []"
    )


def test_a_response_of_a_given_rank_and_size_is_taken_whatever_the_variable_dims_are() -> None:
    mixed = OutputSchema("m", "1", {"y": Spec("y", dtypes.FP32, (-1, 2, -1))}, True)
    for shape in ((3, 0, 2, 0), (3, 7, 2, 1)):
        tensor = np.zeros(shape, np.float32)
        assert mixed.accept(mixed.outputs["y"], tensor, 3) is tensor


@pytest.mark.parametrize(
    ("dims", "reshape", "batched", "shape", "expected"),
    [
        ((3,), None, True, (1, 5), [-1, 3]),
        ((3,), None, True, (1,), [-1, 3]),
        ((3,), None, True, (1, 3, 1), [-1, 3]),
        ((-1, 2), None, True, (1, 2, 3), [-1, -1, 2]),
        ((3,), None, False, (5,), [3]),
        ((), None, False, (1,), []),
        ((1,), (), True, (1, 1), [-1]),
        ((4,), (2, 2), False, (4,), [2, 2]),
    ],
)
def test_rows_of_other_dims_than_the_configs_are_an_error_with_both(
    dims: tuple[int, ...], reshape: tuple[int, ...] | None, batched: bool, shape: tuple[int, ...], expected: list[int]
) -> None:
    spec = Spec("y", dtypes.FP32, dims, reshape=reshape)
    with pytest.raises(BackendError) as caught:
        OutputSchema("m", "1", {"y": spec}, batched).accept(spec, np.zeros(shape, np.float32), 1)
    message = f"model 'm': output 'y' has shape {list(shape)}, but the config says {expected}"
    assert caught.value.message == message


def test_an_output_taken_as_given_that_the_config_lacks_is_dropped_beside_one_that_it_has() -> None:
    taken = OutputSchema("m", "1", {"y": Spec("y", dtypes.FP32, (1,))}, True, True)
    assert list(taken.sign(request(), InferResponse({"debug": ONE, "y": ONE})).outputs) == ["y"]
    with pytest.raises(BackendError, match="returned output 'debug', but the config has only"):
        taken.sign(request(), InferResponse({"debug": ONE}))


def test_an_output_taken_as_given_is_passed_on_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    taken = OutputSchema("m", "1", {"y": Spec("y", dtypes.FP32, (3,)), "z": Spec("z", dtypes.FP32, (1,))}, True, True)
    wrong = np.zeros((1, 5), np.float64)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert taken.accept(taken.outputs["y"], wrong, 1) is wrong
            assert taken.sign(request(), InferResponse({"z": wrong})).outputs["z"] is wrong
    assert caplog.messages == [
        "model 'm': output 'y' is FP64, but the config says FP32; it is passed on as it is",
        "model 'm': output 'z' is FP64, but the config says FP32; it is passed on as it is",
    ]


def test_the_config_that_a_child_reads_has_the_dims_that_a_backend_sees() -> None:
    config = {
        "name": "m",
        "max_batch_size": 8,
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4], "reshape": {"shape": [2, 2]}}],
    }
    schema, tensor = OutputSchema.from_json(config, "1"), np.zeros((1, 2, 2), np.float32)
    assert schema.accept(schema.outputs["y"], tensor, 1) is tensor
    with pytest.raises(BackendError, match=r"has shape \[1, 4\], but the config says \[-1, 2, 2\]"):
        schema.accept(schema.outputs["y"], np.zeros((1, 4), np.float32), 1)


def test_after_a_valid_result_a_wrong_one_is_still_refused() -> None:
    def accept(value: object, rows: int = 2) -> object:
        return SCHEMA.accept_result(SCHEMA.outputs["y"], value, rows)

    usual = np.zeros((2, 3), np.float32)
    for _ in range(2):
        assert accept(usual) is usual
    assert accept(np.zeros((5, 3), np.float32), rows=5) is not None
    with pytest.raises(BackendError, match="has shape \\[2, 3\\], but the batch has 3 rows"):
        accept(usual, rows=3)
    with pytest.raises(BackendError, match=r"has shape \[2\], but the config says"):
        accept(np.zeros(2, np.float32))
    with pytest.raises(BackendError, match=r"has shape \[\], but the batch has 2 rows"):
        accept(np.float32(1))
    with pytest.raises(BackendError, match="is FP64, but the config says FP32"):
        accept(usual.astype(np.float64))
    swapped = accept(usual.astype(">f4"))
    assert isinstance(swapped, np.ndarray)
    assert swapped.dtype == np.dtype("<f4")


def test_a_result_with_a_reshape_is_reshaped_each_time() -> None:
    for _ in range(3):
        accepted = RESHAPED.accept_result(RESHAPED.outputs["y"], np.zeros(4, np.float32), 4)
        assert accepted.shape == (4, 1)
    with pytest.raises(BackendError, match=r"has shape \[4, 1\], but the config says"):
        RESHAPED.accept_result(RESHAPED.outputs["y"], np.zeros((4, 1), np.float32), 4)
