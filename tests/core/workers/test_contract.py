"""What of a response reaches the caller."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import BackendError
from penstock.messages import dtypes
from penstock.messages.request import InferRequest
from penstock.messages.response import InferResponse
from penstock.messages.spec import Spec
from penstock.workers.contract import Contract

CONTRACT = Contract("m", "3", {"y": Spec("y", dtypes.FP32, (-1,)), "z": Spec("z", dtypes.FP32, (1,))}, True)
ONE = np.zeros((1, 1), np.float32)


def request(*outputs: str) -> InferRequest:
    return InferRequest("m", {}, lambda answer, final: None, outputs)


def test_an_output_that_nobody_asked_for_is_dropped_even_if_the_config_lacks_it() -> None:
    signed = CONTRACT.sign(request("y", "z"), InferResponse({"debug": ONE, "y": ONE}))
    assert list(signed.outputs) == ["y"]


def test_a_requested_output_may_be_absent() -> None:
    assert list(CONTRACT.sign(request("z"), InferResponse({"y": ONE})).outputs) == []


def test_a_response_of_unknown_outputs_only_is_an_error_naming_one_and_the_known() -> None:
    with pytest.raises(BackendError, match=r"output 'q', but the config has only \['y', 'z'\]"):
        CONTRACT.sign(request("y"), InferResponse({"q": ONE}))


RESHAPED = Contract("m", "3", {"y": Spec("y", dtypes.FP32, (1,), reshape=())}, True)


def test_the_reshape_of_the_config_is_undone_for_the_client() -> None:
    signed = RESHAPED.sign(request(), InferResponse({"y": np.zeros(3, np.float32)}))
    assert signed.outputs["y"].shape == (3, 1)


def test_a_shape_that_the_reshape_does_not_fit_is_an_error_with_both() -> None:
    answer = RESHAPED.signed(request(), InferResponse({"y": np.zeros((3, 4), np.float32)}))
    assert isinstance(answer, BackendError)
    assert answer.message == (
        "model 'm': output 'y' has shape [3, 4], which does not fit the reshape of the config, []"
    )
