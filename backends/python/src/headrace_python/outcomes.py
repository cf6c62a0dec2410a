"""Checks the results of a model, and describes its exceptions, in Triton's words (docs/spec/behaviours.md section 9.3).

`check_results` is for ``execute`` of a model that is not decoupled. `describe` returns the text of an exception for
callers, in the form of pybind11's ``error_already_set``, which Triton uses: the type and the message, then the frames,
innermost first::

    ValueError: bad value

    At:
      1/model.py(12): helper
      1/model.py(30): execute

Triton shows whole paths. Here callers get paths from the model's directory on, and `headrace.frontends.failures`
shortens other paths. The log, and callers of a verbose server, get whole paths.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Sequence
from types import CodeType

from triton_python_backend_utils import InferenceRequest, InferenceResponse


class BadResults(Exception):
    """The return value of the model broke a rule. The whole batch fails."""


def check_results(requests: Sequence[InferenceRequest], returned: object) -> Sequence[InferenceResponse | None]:
    """Return the responses to ``requests``, in order; None for requests that need none. Raises `BadResults`.

    ``returned`` must be a list with an `InferenceResponse` per request, or None for a request that is rescheduled or
    that its sender answers. If that holds for all requests, ``returned`` may be None.
    """
    if not isinstance(returned, list):
        if returned is None and all(request._rescheduled or request._has_sender for request in requests):
            return [None] * len(requests)
        raise BadResults(f"Expected a list in the execute return, found type '{type(returned)}'.")
    if len(returned) != len(requests):
        raise BadResults(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(returned)}\n"
        )
    for request, response in zip(requests, returned, strict=True):
        if request._rescheduled:
            if response is not None:
                raise BadResults(
                    "Expected a None object in the execute function return list for reschduled request, "
                    f"found type '{type(response)}'."
                )
        elif not (isinstance(response, InferenceResponse) or (response is None and request._has_sender)):
            raise BadResults(
                "Expected an 'InferenceResponse' object in the execute function return list, "
                f"found type '{type(response)}'."
            )
    return returned


_LOG = logging.getLogger("headrace")

#: The most frames in a text. An endless recursion has a thousand.
MAX_FRAMES = 24
#: The most characters of an exception's message. The log has the rest.
MAX_MESSAGE = 2048

#: Top-level packages without frames in the text: they call or import the model.
_OURS = frozenset(("importlib", "headrace", "headrace_engines", "headrace_python", "triton_python_backend_utils"))


def describe(error: BaseException, model: str = "") -> str:
    """Return ``error`` with its frames in the model's code, in the form above.

    Files below the directory ``model`` are named from there, unless the log is verbose.
    """
    text = f"{type(error).__name__}: {_message(error)}"
    home = "" if not model or _LOG.isEnabledFor(logging.DEBUG) else f"{model.rstrip('/')}/"
    frames = [f"  {code.co_filename.removeprefix(home)}({line}): {code.co_name}\n" for code, line in _frames(error)]
    frames.reverse()
    if len(frames) > MAX_FRAMES:
        frames[MAX_FRAMES:] = [f"  ... {len(frames) - MAX_FRAMES} more\n"]
    return f"{text}\n\nAt:\n{''.join(frames)}" if frames else text


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        return "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
    if len(text) > MAX_MESSAGE:
        text = f"{text[:MAX_MESSAGE]}... ({len(text) - MAX_MESSAGE} more characters)"
    return text or "<EMPTY MESSAGE>"


def _frames(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in _OURS:
            yield frame.f_code, line
