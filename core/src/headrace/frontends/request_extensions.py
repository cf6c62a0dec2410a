"""The names of four protocol extensions for the server metadata.

Their code is in `classification`, `request_parameters` and the two frontends.
"""

from __future__ import annotations

from typing import ClassVar

from headrace.frontends.extension import Extension


class Classification(Extension):
    """The top classes of an output in place of the output."""

    name: ClassVar[str] = "classification"
    announces = ("classification",)


class BinaryTensorData(Extension):
    """Tensors as bytes behind the JSON of a request or a response."""

    name: ClassVar[str] = "binary_tensor_data"
    announces = ("binary_tensor_data",)


class SchedulePolicy(Extension):
    """The priority and the timeout of a request."""

    name: ClassVar[str] = "schedule_policy"
    announces = ("schedule_policy",)


class Parameters(Extension):
    """Parameters of requests and responses that models read and write."""

    name: ClassVar[str] = "parameters"
    announces = ("parameters",)


METADATA_ONLY: list[type[Extension]] = [Classification, SchedulePolicy, BinaryTensorData, Parameters]
