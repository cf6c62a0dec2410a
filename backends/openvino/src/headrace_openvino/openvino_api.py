"""OpenVINO itself, imported when the first model needs it, and its errors in our words."""

from __future__ import annotations

from typing import Any

from headrace import LoadError, one_line

#: How the lines of an error begin that say where in its own source OpenVINO raised it.
_PLACES = ("Exception from ", "Check '")


def load_engine() -> Any:
    """The module ``openvino``; raises `LoadError` saying how to install it."""
    try:
        import openvino
    except ImportError as error:
        raise LoadError(
            "backend 'openvino' needs the package openvino, which cannot be imported "
            f"({one_line(str(error))}); run: pip install openvino"
        ) from error
    return openvino


def open_core(openvino: Any) -> Any:
    """An ``openvino.Core`` of one model's own, whose settings and extensions are nobody else's."""
    core = openvino.Core()
    # A mapped file that somebody shortens while the model is served would end the process.
    core.set_property({"ENABLE_MMAP": False})
    return core


def reword(error: BaseException) -> str:
    """What an OpenVINO error says, without the lines about places in its own source."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(_PLACES)]
    return one_line(" ".join(said) or type(error).__name__)
