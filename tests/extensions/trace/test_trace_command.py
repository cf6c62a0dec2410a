"""``headrace trace`` on a file of a real Triton with known times, and on malformed files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from headrace_testing import CommandConformance
from headrace_trace.trace_command import TraceCommand
from headrace_trace.trace_reading import read_traces
from headrace_trace.waterfall import MAX_ROWS, as_svg, as_text, rows
from tests.conftest import HEADRACE

TRITONS = Path(__file__).with_name("triton.json")


class TestKit(CommandConformance):
    plugin, command = "headrace_trace", "trace"
    good, bad = (str(TRITONS),), ("nowhere.json",)


def run(*words: str) -> int:
    command = TraceCommand()
    return command.run(command.parse(list(words)))


def write_trace(path: Path, calls: list[tuple[int, int, str, dict[str, int]]]) -> Path:
    """Write a file with calls: id, parent, model, and microseconds of each event."""
    records: list[Any] = []
    for number, parent, model, events in calls:
        records.append({"id": number, "model_name": model, "model_version": 1, "request_id": f"r{number}"})
        if parent:
            records[-1]["parent_id"] = parent
        stamps = [{"name": name, "ns": 1_000_000 + us * 1000} for name, us in events.items()]
        records += [{"id": number, "timestamps": [stamp]} for stamp in stamps]
    path.write_text(json.dumps(records))
    return path


ENSEMBLE: list[tuple[int, int, str, dict[str, int]]] = [
    (1, 0, "both", {"HTTP_RECV_START": 0, "HTTP_RECV_END": 100, "REQUEST_START": 100, "HTTP_SEND_START": 900,
                    "HTTP_SEND_END": 1000}),
    (2, 1, "first", {"REQUEST_START": 200, "QUEUE_START": 200, "COMPUTE_START": 300, "COMPUTE_INPUT_END": 310,
                     "COMPUTE_OUTPUT_START": 490, "COMPUTE_END": 500, "REQUEST_END": 500}),
    (3, 1, "second", {"REQUEST_START": 500, "QUEUE_START": 500, "COMPUTE_START": 600, "COMPUTE_INPUT_END": 600,
                      "COMPUTE_OUTPUT_START": 800, "COMPUTE_END": 800, "REQUEST_END": 800}),
]  # fmt: skip


def test_a_summary_has_the_mean_of_each_step_and_the_slowest_request_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faster = [(number + 3, parent and 4, model, {name: at // 2 for name, at in events.items()})
              for number, parent, model, events in ENSEMBLE]  # fmt: skip
    assert run(str(write_trace(tmp_path / "t.json", [*ENSEMBLE, *faster]))) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    assert table == [
        ["Model", "Version", "Calls", "queue ms", "input ms", "infer ms", "output ms", "p50 ms", "p90 ms", "max ms"],
        ["both", "1", "2", "-", "-", "-", "-", "0.500", "0.500", "1.000"],
        ["first", "1", "2", "0.075", "0.007", "0.135", "0.007", "0.150", "0.150", "0.300"],
        ["second", "1", "2", "0.075", "0.000", "0.150", "0.000", "0.150", "0.150", "0.300"],
    ]
    assert "request 'r1' of model 'both', trace 1: 1.000 ms" in lines
    drawn = lines[lines.index("request 'r1' of model 'both', trace 1: 1.000 ms") + 1 :]
    assert [line.split("|")[0].rstrip() for line in drawn] == [
        "both 1", "  receive", "  first 1", "    queue", "    input", "    infer", "    output", "  second 1",
        "    queue", "    infer", "  send",
    ]  # fmt: skip
    bars = [line.split("|")[1] for line in drawn]
    assert (bars[0], bars[1]) == ("=" * 60, "#" * 6 + " " * 54)
    assert (bars[3].index("#"), bars[3].count("#")) == (12, 6)


def test_a_request_is_selected_by_id_and_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(TRITONS), "--request=g-twice") == 0
    assert "request 'g-twice' of model 'twice', trace 10: " in capsys.readouterr().out
    assert run(str(TRITONS), "--model=adds", "--request=15") == 0
    assert "request 's-adds' of model 'adds', trace 15: " in capsys.readouterr().out
    assert run(str(TRITONS), "--request=none") == run(str(TRITONS), "--model=none") == 1
    stderr = capsys.readouterr().err.splitlines()
    assert stderr == ["no request has the id 'none'", f"'{TRITONS}' has no request to model 'none'"]


def test_the_drawing_is_an_svg_document_with_a_bar_for_each_row(tmp_path: Path) -> None:
    (root,) = read_traces(str(write_trace(tmp_path / "t.json", [(1, 0, "<a&b>", ENSEMBLE[0][3]), *ENSEMBLE[1:]])))
    document = ElementTree.fromstring(as_svg(root))
    bars = [each for each in document.iter() if each.tag.endswith("rect")][1:]
    assert len(bars) == len(rows(root)) == 11
    assert [float(bar.get("width", "")) for bar in bars][:3] == [620.0, 62.0, 186.0]
    assert any(each.text == "<a&b> 1" for each in document.iter())


def test_the_drawing_is_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(TRITONS), f"--svg={tmp_path / 'w.svg'}") == 0
    assert ElementTree.parse(tmp_path / "w.svg").getroot().tag.endswith("svg")
    assert run(str(TRITONS), f"--svg={tmp_path / 'none/w.svg'}") == 1
    assert "w.svg' can not be written: No such file or directory" in capsys.readouterr().err


def test_an_event_without_a_time_is_left_out(tmp_path: Path) -> None:
    """As Triton 2.51 writes it for a request of generate."""
    times = {"REQUEST_START": 500, "REQUEST_END": 900, "HTTP_SEND_START": 0, "HTTP_SEND_END": 0}
    stamps = [{"name": name, "ns": at_ns} for name, at_ns in times.items()]
    (tmp_path / "trace.json").write_text(json.dumps([{"id": 1, "model_name": "m", "timestamps": stamps}]))
    (call,) = read_traces(str(tmp_path / "trace.json"))
    assert (call.begin_ns, call.took_ns) == (500, 400)


def test_a_file_that_is_still_written_is_read(tmp_path: Path) -> None:
    whole = TRITONS.read_text().rstrip()
    (tmp_path / "t.json").write_text(whole[:-1])
    assert read_traces(str(tmp_path / "t.json")) == read_traces(str(TRITONS))


BROKEN = {
    "": "it is empty",
    "[5 ": "record 0 is no object with a number 'id'",
    "[x": "its JSON is broken",
    '{"id": 1}': "its JSON is no array",
    "[5]": "record 0 is no object with a number 'id'",
    '[{"id": "x"}]': "record 0 is no object with a number 'id'",
    '[{"id": 1, "timestamps": 5}]': "'timestamps' of record 0 is no array of objects",
    '[{"id": 1, "timestamps": [{"name": "A", "ns": "x"}]}]': "'ns' of record 0 is no integer",
    '[{"id": 1, "model_name": "m", "parent_id": {}}]': "'parent_id' of record 0 is no integer",
    "[" * 100_000: "its JSON is",
}


@pytest.mark.parametrize("text", list(BROKEN), ids=lambda text: text[:20])
def test_a_malformed_file_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "t.json").write_text(text)
    assert run(str(tmp_path / "t.json")) == 1
    assert f"t.json' is no trace file: {BROKEN[text]}" in capsys.readouterr().err


def test_cycles_and_deep_nesting_terminate(tmp_path: Path) -> None:
    events = {"REQUEST_START": 1, "REQUEST_END": 2}
    circle = [(1, 2, "a", events), (2, 1, "b", events), (3, 3, "c", events)]
    roots = read_traces(str(write_trace(tmp_path / "circle.json", circle)))
    assert [root.id for root in roots] == [1, 3]
    deep = [(number, number - 1, "m", events) for number in range(1, 3000)]
    (root,) = read_traces(str(write_trace(tmp_path / "deep.json", deep)))
    assert len(rows(root)) == MAX_ROWS
    assert len(as_text(root).splitlines()) == MAX_ROWS + 1
    assert run(str(tmp_path / "deep.json")) == 0


def test_terminal_codes_in_a_file_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "t.json", [(1, 0, "a\x1b[31m\n", {"REQUEST_START": 1, "REQUEST_END": 2})])
    assert run(str(path)) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_the_command_line_finds_it(tmp_path: Path) -> None:
    done = subprocess.run([HEADRACE, "trace", str(TRITONS)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "| twice | 1       | 2     |" in done.stdout
