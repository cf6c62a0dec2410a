"""Reports of ``headrace check``: places, nearest names, completed fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_inspect.reports import locate
from tests.commands.inspect.checking import CONFIG, check, placed, write


def test_a_misspelt_field_is_placed_with_the_nearest_name(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(repository, "bad", 'backend: "identity"\n  max_bach_size: 4\n')
    code, found = check(capsys, str(repository))
    (problem,) = found["bad"]["problems"]
    assert code == 1
    assert (problem["file"], problem["line"], problem["column"]) == (str(path), 2, 3)
    assert problem["field"] == ""
    assert problem["message"] == "ModelConfig has no field 'max_bach_size'; did you mean 'max_batch_size'?"


def test_a_wrong_value_is_placed_at_the_wrong_word(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, "bad", 'max_batch_size: 4\nbackend: "idenity"\n')
    _, found = check(capsys, str(repository))
    (problem,) = found["bad"]["problems"]
    assert (problem["line"], problem["column"]) == (2, 10)
    assert "did you mean 'identity'?" in problem["message"]


def test_completed_fields_are_shown_with_their_source(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (repository / "echo" / "config.pbtxt").read_text() + "max_batch_size: 4 dynamic_batching { }"
    write(repository, "batched", config)
    _, found = check(capsys, str(repository))
    filled = {one["field"]: (one["value"], one["source"]) for one in found["batched"]["completed"]}
    assert filled["name"] == ("batched", "Headrace")
    assert filled["dynamic_batching.preferred_batch_size"] == ("[4]", "Headrace")
    assert "backend" not in filled


def test_every_problem_is_listed_with_its_place_in_order_of_the_file(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = """\
backend: "identity"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 4, 0 ] }
input {
  name: "x"
  dims: 3
}
output [
  { name: "y" data_type: TYPE_FP32 dims: 4 label_filename: "../labels.txt" }
]
dynamic_batching { preferred_batch_size: [ 4, 8 ] }
instance_group { count: -1 }
"""
    path = write(repository, "bad", config)
    code, found = check(capsys, str(repository))
    assert code == 1
    assert found["bad"]["problems"][0] == {
        "file": str(path),
        "line": 3,
        "column": 46,
        "field": "input[0].dims",
        "message": "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension "
        "for bad",
        "code": "Invalid argument",
    }
    assert placed(found["bad"])[1:] == [
        (4, 1, "input[1].data_type", "model input 'x' must specify 'data_type' for bad"),
        (5, 9, "input[1].name", "model input 'x' is specified more than once for bad"),
        (
            9,
            60,
            "output[0].label_filename",
            "label file path '../labels.txt' for output 'y' in model 'bad' is outside model directory",
        ),
        (
            11,
            47,
            "dynamic_batching.preferred_batch_size[1]",
            "dynamic batching preferred size must be <= max batch size for bad",
        ),
        (
            12,
            25,
            "instance_group[0].count",
            "instance group bad_0 of model bad has count -1, expected 1 to 1024, or 0 for the default",
        ),
    ]
    assert found["bad"]["problems"][3]["code"] == "Unsupported"


def test_a_problem_without_a_field_has_no_place(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "none.identity").mkdir()
    _, found = check(capsys, str(repository))
    assert placed(found["none.identity"]) == [
        (
            0,
            0,
            "",
            "at least one version must be available under the version policy of model 'none.identity'. It has no "
            "version directory, such as '1', which holds the model's files, and is empty for an ensemble",
        )
    ]


def test_a_missing_label_file_is_placed_at_its_name(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, "bad", CONFIG + '\noutput { name: "z" data_type: TYPE_BOOL dims: 1\nlabel_filename: "none.txt" }')
    _, found = check(capsys, str(repository))
    (problem,) = [one for one in placed(found["bad"]) if one[2]]
    assert problem[:3] == (7, 17, "output[1].label_filename")
    assert problem[3].startswith("cannot read label file")


def test_every_wrong_parameter_is_placed_at_its_key(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        repository,
        "bad",
        CONFIG
        + """\
parameters { key: "execute_delay_ms" value { string_value: "ten" } }
parameters {
  key: "execute_delay" value { string_value: "10" }
}""",
    )
    _, found = check(capsys, str(repository))
    assert placed(found["bad"]) == [
        (
            5,
            19,
            "parameters['execute_delay_ms']",
            "parameter 'execute_delay_ms' is 'ten', expected a whole number",
        ),
        (
            7,
            8,
            "parameters['execute_delay']",
            "unknown parameter 'execute_delay'; did you mean 'execute_delay_ms'? known: creation_delay_sec, "
            "execute_delay_ms, instance_wise_delay_multiplier",
        ),
    ]


FILLER = """
import headrace

class Filler(headrace.Backend):
    name = "filler"
    def load(self, model): ...
    def complete_config(self, model):
        if model.name == "broken":
            raise KeyError("nowhere")
        model.config.input[0].dims.append(0)

@headrace.hookimpl
def register_backends(): return [Filler]
"""


def test_a_value_filled_in_by_a_backend_has_no_place(
    headrace: Callable[..., Any], repository: Path, distribute: Callable[[str, str], None]
) -> None:
    distribute("filler", FILLER)
    config = 'backend: "filler"\ninput { name: "a" data_type: TYPE_BOOL }'
    write(repository, "filled", config)
    write(repository, "broken", config)
    process = headrace("check", "--json", str(repository))
    code, _ = process.finish()
    found = {one["model"]: one for one in json.load(process.popen.stdout)}
    assert code == 1
    assert [one[:3] for one in placed(found["filled"])] == [(0, 0, "input[0].dims")]
    assert placed(found["broken"]) == [
        (0, 0, "", "backend 'filler' failed to complete the config of 'broken': KeyError: 'nowhere'")
    ]


def test_an_unsupported_device_is_placed_at_its_group(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_cli.inspection.inspector.available_gpus", lambda: (0,))
    monkeypatch.setattr("headrace.models.configuring.available_gpus", lambda: (0,))
    write(repository, "bad", CONFIG + "instance_group [ { kind: KIND_CPU },\n { kind: KIND_GPU } ]")
    _, found = check(capsys, str(repository))
    assert [one[:3] for one in placed(found["bad"])] == [(6, 10, "instance_group[1].kind")]


def test_a_label_file_with_nul_in_its_name_is_one_problem(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = 'output { name: "b" data_type: TYPE_BOOL dims: 1\nlabel_filename: "\\0" }'
    write(repository, "bad", f'backend: "identity" {output}')
    _, found = check(capsys, str(repository))
    assert [one[:3] for one in placed(found["bad"])] == [(2, 17, "output[0].label_filename")]


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("SyntaxError: invalid syntax (model.py, line 3)", 3),
        ("ValueError: boom\n\nAt:\n  1/model.py(4): initialize\n  1/model.py(9): f\n", 4),
        ("engine (CPU, line of products) failed", 0),
        ("SyntaxError: odd (nowhere.py, line 3)", 0),
        ("", 0),
    ],
)
def test_an_error_is_placed_in_its_file(message: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.py").touch()
    assert locate(message, tmp_path, 1, "model.py") == (tmp_path / "1" / "model.py", line)
    assert locate("failed", tmp_path, 1, "") == (tmp_path / "1", 0)
