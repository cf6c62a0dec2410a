"""The log: Triton's formats by regular expression, JSON by json.loads, and hostile text."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.option_parts import LogFormat
from headrace.config.options import ServerOptions
from headrace.telemetry import log_limits
from headrace.telemetry.log_output import LogOutput, set_thread_model
from headrace.telemetry.logs import LOGGER, JsonFormatter, LineFormatter, Log, LogSettings, escape
from headrace.telemetry.metrics import lost_lines

HOSTILE = 'a"b\r\nI0101 00:00:00.000000 1 forged.py:1] "all is well"\x1b[31m\x9b2J\u2028\u202e\ud800\x00'
log = logging.getLogger("headrace.test")

#: Logs four lines into a file, of which the second and third exceed the size that files may have.
WRITE = """
import logging, resource, sys
from headrace.telemetry import log_limits
from headrace.telemetry.logs import Log, LogSettings
def limit(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
opened, log = Log(LogSettings(file=sys.argv[1]), {}), logging.getLogger("headrace.test")
log.error("one")
if len(sys.argv) > 2:
    limit(int(sys.argv[2]))
log.error("two" + "o" * 200)
log.error("three")
limit(resource.RLIM_INFINITY)
log.error("four")
opened.close()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def opened(path: Path) -> Iterator[Log]:
    opened = Log(LogSettings(file=str(path)), {})
    yield opened
    opened.close()


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("headrace.x", level, "/src/file.py", 441, message, (), None)


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


def test_logging_is_restored(path: Path) -> None:
    root = logging.getLogger()

    def state() -> list[object]:
        hooks = (threading.excepthook, sys.unraisablehook, warnings.showwarning)
        return [root.level, list(root.handlers), LOGGER.level, LOGGER.propagate, list(LOGGER.handlers), *hooks]

    before = state()
    opened = Log(LogSettings(file=str(path), verbose_level=1), {})
    assert LOGGER.propagate  # handlers of the host program stay
    assert state() != before
    opened.close()
    assert state() == before


@pytest.mark.parametrize("form", ["default", "json"])
def test_every_logger_speaks_in_the_form_of_the_log(opened: Log, path: Path, form: LogFormat) -> None:
    """A plugin's own, a library's, a warning, and what a thread dies of."""
    opened.change(LogSettings(format=form, verbose_level=1))
    logging.getLogger("somebodys_plugin.part").info("from a plugin")
    logging.getLogger("somebodys_plugin.part").debug("chatter of others")
    logging.getLogger("headrace.somebody").debug("verbose of ours")
    logging.getLogger("py.warnings").warning("mind this")
    thread = threading.Thread(target=lambda: [][0], name="worker-7")
    thread.start()
    thread.join()
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    for line, text in zip(lines, ("from a plugin", "verbose of ours", "mind this", "worker-7"), strict=True):
        assert text in (json.loads(line)["message"] if form == "json" else line)
    assert "IndexError" in lines[3]


def test_log_lines_that_peers_cause_in_a_transport_are_rate_limited(
    opened: Log, path: Path, asyncio_complaints: list[str]
) -> None:
    for number in range(1000):
        logging.getLogger("asyncio").error("exception in callback %d", number)
        logging.getLogger("somebodys_model").error("line %d", number)
    opened.close()
    asyncio_complaints.clear()
    lines = path.read_text().splitlines()
    assert len([line for line in lines if '"exception in callback' in line]) == log_limits.BURST
    assert len([line for line in lines if "more lines like this were left out" in line]) == 1
    assert len([line for line in lines if '"line ' in line]) == 1000


def test_a_record_has_an_end(opened: Log, path: Path) -> None:
    def recurse(depth: int) -> int:
        return 1 // 0 if depth == 300 else again(depth + 1)

    def again(depth: int) -> int:  # so that no frame repeats the one above it
        return recurse(depth)

    log.error("%s", "x" * 1_000_000)
    try:
        recurse(0)
    except ZeroDivisionError:
        log.exception("failed")
    first, second = path.read_text().splitlines()
    assert len(first) < 25_000
    assert "... (975424 characters) ..." in first
    assert len(second) < 30_000
    assert second.endswith('ZeroDivisionError: integer division or modulo by zero"')


def test_the_json_form_names_the_model_of_the_thread(opened: Log, path: Path) -> None:
    opened.change(LogSettings(format="json"))

    def work() -> None:
        set_thread_model("digits")
        logging.getLogger("somebodys_model").info("one")
        log.info("two", extra={"model": "words"})

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    log.info("three")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record.get("model") for record in records] == ["digits", "words", None]


class Ill:
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("form", ["default", "json"])
def test_a_record_that_cannot_be_formatted_is_still_one_line(
    path: Path, form: LogFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own would raise
    opened = Log(LogSettings(file=str(path), format=form), {})
    log.info("%s", Ill())
    log.info("%d %d", 1)
    log.info("next")
    opened.close()
    first, second, third = path.read_text().splitlines()
    assert "RuntimeError: no words" in first
    assert "TypeError" in second
    assert "next" in third


def test_a_full_disk_loses_only_log_lines(capfd: pytest.CaptureFixture[str]) -> None:
    before = LogOutput.lost
    opened = Log(LogSettings(file="/dev/full"), {})
    for _ in range(3):
        log.error("lost")
    opened.close()
    assert capfd.readouterr() == ("", "")
    assert LogOutput.lost == before + 3
    (sample,) = lost_lines().samples
    assert (sample.name, sample.value) == ("headrace_log_lines_lost", before + 3)


def test_a_full_disk_under_standard_error_does_not_change_the_exit_code() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", WRITE, ""], stderr=full, check=False)
    assert done.returncode == 0


def test_closed_standard_error_does_not_change_the_exit_code() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", WRITE, ""], stderr=writer, check=False)
    os.close(writer)
    assert done.returncode == 0


def test_number_of_lost_lines_is_logged_as_soon_as_a_line_can_be_written(path: Path) -> None:
    """The limit on the size of files stands in for the disk: a line is torn in the middle."""
    subprocess.run([sys.executable, "-c", WRITE, str(path), "120"], check=True)
    lines = path.read_text().splitlines()
    assert lines[0].endswith('"one"')
    assert not lines[1].endswith('"')  # torn
    assert re.fullmatch(r'W.* log_output\.py:0\] "2 records were lost: File too large"', lines[2])
    assert lines[3].endswith('"four"')


def test_settings_come_from_the_options() -> None:
    options = ServerOptions(
        log_file="f", log_info=False, log_warning=False, log_error=False, log_verbose=2, log_format="json"
    )
    assert LogSettings.from_options(options) == LogSettings("f", False, False, False, 2, "json")


def test_a_verbose_log_shows_all_packages_of_the_distribution() -> None:
    packages = [path.name for path in (Path(__file__).parents[3] / "core/src").glob("headrace*") if path.is_dir()]
    assert len(packages) > 4
    with contextlib.closing(Log(LogSettings(verbose_level=1))):
        assert {name: logging.getLogger(name).isEnabledFor(logging.DEBUG) for name in packages} == dict.fromkeys(
            packages, True
        )
