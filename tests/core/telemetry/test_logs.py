"""The log: Triton's formats by regular expression, JSON by json.loads, and hostile text."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.options import LogFormat, ServerOptions
from penstock.telemetry.logs import LOGGER, JsonFormatter, LineFormatter, Log, LogSettings, escape

HOSTILE = 'a"b\r\nI0101 00:00:00.000000 1 forged.py:1] "all is well"\x1b[31m\x9b2J\u2028\u202e\ud800\x00'
log = logging.getLogger("penstock.test")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def opened(path: Path) -> Iterator[Log]:
    opened = Log(LogSettings(file=str(path)), {})
    yield opened
    opened.close()


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("penstock.x", level, "/src/file.py", 441, message, (), None)


def test_default_line_is_tritons() -> None:
    line = LineFormatter("default").format(record("message"))
    assert re.fullmatch(rf'I\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} {os.getpid()} file\.py:441\] "message"', line)


def test_iso_line_is_tritons() -> None:
    line = LineFormatter("ISO8601").format(record("message", logging.WARNING))
    assert re.fullmatch(rf'\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ W {os.getpid()} file\.py:441\] "message"', line)


def test_times_are_utc() -> None:
    one = record("message")
    one.created = 1716235405.829575  # 2024-05-20 20:03:25.829575 UTC
    assert LineFormatter("default").format(one).startswith("I0520 20:03:25.829575 ")
    assert LineFormatter("ISO8601").format(one).startswith("2024-05-20T20:03:25Z ")
    assert json.loads(JsonFormatter().format(one))["time"] == "2024-05-20T20:03:25.829575+00:00"


@pytest.mark.parametrize(
    ("level", "letter"),
    [(logging.DEBUG, "I"), (logging.INFO, "I"), (logging.WARNING, "W"), (logging.ERROR, "E"), (logging.CRITICAL, "E")],
)
def test_the_letter_is_that_of_the_level(level: int, letter: str) -> None:
    assert LineFormatter("default").format(record("m", level))[0] == letter


def test_json_has_the_message_unchanged_and_the_context() -> None:
    one = record(HOSTILE)
    one.__dict__.update(request_id="r\n1", model="digits", version=3)
    found = json.loads(JsonFormatter().format(one))
    assert found["message"] == HOSTILE
    assert (found["request_id"], found["model"], found["version"]) == ("r\n1", "digits", 3)
    assert (found["level"], found["file"], found["line"]) == ("INFO", "file.py", 441)


@pytest.mark.parametrize("form", ["default", "ISO8601", "json"])
def test_hostile_text_makes_exactly_one_printable_line(opened: Log, path: Path, form: LogFormat) -> None:
    opened.change(LogSettings(format=form))
    log.info("request %s", HOSTILE)
    text = path.read_bytes().decode()
    assert len(text.splitlines()) == 1
    assert text.rstrip("\n").isprintable()


@settings(max_examples=200)
@given(st.text())
def test_an_escaped_message_is_printable_json_of_itself(text: str) -> None:
    shown = escape(text)
    assert json.loads(shown) == text
    assert len(f"{shown}|".splitlines()) == 1
    assert not re.search("[\x00-\x1f\x7f-\x9f]", shown)


def test_escaping_can_be_turned_off_by_the_environment(path: Path) -> None:
    opened = Log(LogSettings(file=str(path)), {"TRITON_SERVER_ESCAPE_LOG_MESSAGES": "0"})
    log.info('say "x"')
    opened.close()
    assert path.read_text().endswith('] say "x"\n')


def test_a_traceback_stays_in_its_record(opened: Log, path: Path) -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        log.exception("failed")
    (line,) = path.read_text().splitlines()
    assert "KeyError: 'lost'" in line


def test_a_table_follows_its_heading(opened: Log, path: Path) -> None:
    log.info("models", extra={"table": "+-+\n| |\n+-+"})
    heading, *table = path.read_text().splitlines()
    assert heading.endswith('"models"')
    assert table == ["+-+", "| |", "+-+"]


@pytest.mark.parametrize("toggle", ["info", "warning", "error"])
def test_each_level_has_its_own_toggle(opened: Log, path: Path, toggle: str) -> None:
    opened.change(LogSettings(info=toggle != "info", warning=toggle != "warning", error=toggle != "error"))
    for name in ("info", "warning", "error"):
        getattr(log, name)(name)
    shown = re.findall(r'"(\w+)"', path.read_text())
    assert shown == [name for name in ("info", "warning", "error") if name != toggle]


@pytest.mark.parametrize("verbose", [0, 1, 2, 9, 50])
def test_verbosity_shows_its_level_and_those_below(opened: Log, path: Path, verbose: int) -> None:
    opened.change(LogSettings(verbose_level=verbose))
    for level in (1, 2, 3):
        log.log(logging.DEBUG + 1 - level, "%d", level)
    assert re.findall(r'"(\d)"', path.read_text()) == [str(level) for level in (1, 2, 3) if level <= verbose]


def test_the_file_is_appended_to(path: Path) -> None:
    path.write_text("before\n")
    opened = Log(LogSettings(file=str(path)), {})
    log.info("after")
    opened.close()
    assert path.read_text().startswith("before\nI")


def test_only_the_logger_of_penstock_is_touched_and_given_back(path: Path) -> None:
    root, before = logging.getLogger(), (LOGGER.level, LOGGER.propagate, list(LOGGER.handlers))
    root_handlers = list(root.handlers)
    opened = Log(LogSettings(file=str(path), verbose_level=1), {})
    assert (root.level, list(root.handlers)) == (logging.WARNING, root_handlers)
    assert not LOGGER.propagate  # or each record would be printed twice
    opened.close()
    assert (LOGGER.level, LOGGER.propagate, list(LOGGER.handlers)) == before


def test_settings_come_from_the_options() -> None:
    options = ServerOptions(
        log_file="f", log_info=False, log_warning=False, log_error=False, log_verbose=2, log_format="json"
    )
    assert LogSettings.from_options(options) == LogSettings("f", False, False, False, 2, "json")
