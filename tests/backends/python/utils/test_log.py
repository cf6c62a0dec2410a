"""The logger of pb_utils (docs/spec/behaviours.md section 9.2)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils

if TYPE_CHECKING:
    from tests.backends.python.utils.conftest import FunctionServices

Logger = pb_utils.Logger


@pytest.mark.usefixtures("runtime")
def test_line_goes_to_the_server_as_from_where_it_was_written(services: FunctionServices) -> None:
    first = sys._getframe().f_lineno + 1
    Logger.log("m")
    Logger.log("m", Logger.ERROR)
    Logger.log("m", level=Logger.LogLevel.WARNING)
    Logger.log_info("i")
    Logger.log_warn("w")
    Logger.log_error("e")
    Logger.log_verbose("v")

    expected = [("info", "m"), ("error", "m"), ("warning", "m"), ("info", "i")]
    expected += [("warning", "w"), ("error", "e"), ("verbose", "v")]
    assert services.lines == [(*line, "test_log.py", first + n) for n, line in enumerate(expected)]


def test_without_a_server_lines_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    Logger.log_warn("careful")
    assert capsys.readouterr().out == "warning: careful\n"


def test_levels_have_tritons_numbers() -> None:
    assert [Logger.INFO, Logger.WARNING, Logger.ERROR, Logger.VERBOSE] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("message", "level", "kind"),
    [
        (3, 0, TypeError),
        (None, 0, TypeError),
        (["m"], 0, TypeError),
        ("m", 7, TypeError),
        ("m", None, TypeError),
        ("m", "INFO", TypeError),
    ],
)
def test_what_is_no_line_is_refused(message: Any, level: int, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Logger.log(message, level)


@pytest.mark.usefixtures("runtime")
def test_bytes_are_a_line_whatever_they_say(services: FunctionServices) -> None:
    Logger.log(b"m")
    Logger.log_info(bytearray(b"i"))
    Logger.log_warn(np.str_("w"))
    Logger.log_error(np.bytes_(b"e"))
    Logger.log_verbose(b"\xffv")
    assert [line[1] for line in services.lines] == ["m", "i", "w", "e", "\\xffv"]
    assert {type(line[1]) for line in services.lines} == {str}
