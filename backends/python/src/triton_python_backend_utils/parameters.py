"""Parameters that a model gives to a request or a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from triton_python_backend_utils.error import TritonModelException

Parameter: TypeAlias = "str | int | bool | float"


def checked(parameters: Mapping[str, Parameter] | None) -> dict[str, Parameter]:
    """A copy of ``parameters``, empty for None. Raises `TritonModelException` for what cannot be sent."""
    if parameters is None:
        return {}
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to have type dict, found type {type(parameters)}")
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)
