"""The results and names of a real Triton 2.51 for the same calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils


@pytest.mark.parametrize("array", [None, [1.0], b"x"])
def test_the_error_for_no_array_precedes_the_one_for_an_empty_name(array: Any) -> None:
    with pytest.raises(TypeError, match="Tensor takes a NumPy array"):
        pb_utils.Tensor("", array)


def test_an_empty_name_is_refused_in_tritons_words() -> None:
    with pytest.raises(pb_utils.TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        pb_utils.Tensor("", np.zeros(1, np.float32))


@pytest.mark.parametrize(("parameters", "shown"), [([], "list"), ("", "str"), ((), "tuple")])
def test_parameters_that_are_no_dictionary_are_refused_in_tritons_words(parameters: Any, shown: str) -> None:
    words = f"^Expect N8pybind114dictE, got <class '{shown}'>$"
    with pytest.raises(pb_utils.TritonModelException, match=words):
        pb_utils.InferenceRequest(model_name="m", requested_output_names=[], inputs=[], parameters=parameters)
    with pytest.raises(pb_utils.TritonModelException, match=words):
        pb_utils.InferenceResponse([], parameters=parameters)


def test_the_number_of_a_member_is_refused() -> None:
    family: Any = pb_utils.MetricFamily
    with pytest.raises(TypeError, match=r"must be of type MetricKind \(COUNTER, GAUGE, HISTOGRAM\), found type 'int'"):
        family("n", "d", 0)
    memory: Any = pb_utils.PreferredMemory
    with pytest.raises(TypeError, match="must be of type MemoryType"):
        memory(0)
    error: Any = pb_utils.TritonError
    with pytest.raises(TypeError, match="must be of type ErrorCode"):
        error("m", 3)


def test_the_classes_are_found_under_tritons_other_name() -> None:
    import c_python_backend_utils as c_utils

    assert c_utils.COUNTER is pb_utils.MetricFamily.COUNTER
    for name in c_utils.__all__:
        if name not in ("COUNTER", "GAUGE", "HISTOGRAM"):
            assert getattr(c_utils, name) is getattr(pb_utils, name)
