"""What ``execute`` of a model that is not decoupled may return, and Triton's words for what it may not.

Source: docs/spec/behaviours.md section 9.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from triton_python_backend_utils import InferenceRequest, InferenceResponse


class BadResults(Exception):
    """The model broke a rule of the return value, which fails the whole batch."""


def judge(requests: Sequence[InferenceRequest], returned: object) -> list[tuple[InferenceRequest, InferenceResponse]]:
    """The requests that ``returned`` answers, with their responses. Raises `BadResults`.

    It must be a list with an `InferenceResponse` per request. None stands for a request that is to
    be executed again or that its sender answers; for a batch of such requests, so does None alone.
    """
    if returned is None and all(request._rescheduled or request._has_sender for request in requests):
        return []
    if not isinstance(returned, list):
        raise BadResults(f"Expected a list in the execute return, found type '{type(returned)}'.")
    if len(returned) != len(requests):
        raise BadResults(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}\n"
        )
    answered: list[tuple[InferenceRequest, InferenceResponse]] = []
    for request, response in zip(requests, returned, strict=True):
        if _is_response(request, response):
            answered.append((request, response))
    return answered


def _is_response(request: InferenceRequest, response: object) -> bool:
    """False for the None of a request that needs no response. Raises `BadResults`."""
    if request._rescheduled:
        if response is not None:
            raise BadResults(
                "Expected a None object in the execute function return list for reschduled request, "
                f"found type '{type(response)}'."
            )
        return False
    if isinstance(response, InferenceResponse):
        return True
    if response is None and request._has_sender:
        return False
    raise BadResults(
        f"Expected an 'InferenceResponse' object in the execute function return list, found type '{type(response)}'."
    )
