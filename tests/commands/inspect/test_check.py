"""``headrace check``: places, nearest names, completions, exit codes."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.identity import Identity
from headrace.storage.local_storage import is_model
from headrace_cli import main
from headrace_inspect.reports import locate


def write(repository: Path, name: str, config: str) -> Path:
    (repository / name / "1").mkdir(parents=True)
    path = repository / name / "config.pbtxt"
    path.write_text(config)
    return path


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(["check", "--json", *words])
    return code, {found["model"]: found for found in json.loads(capsys.readouterr().out)}


def placed(found: dict[str, Any]) -> list[tuple[int, int, str, str]]:
    return [(one["line"], one["column"], one["field"], one["message"]) for one in found["problems"]]


CONFIG = """
backend: "identity"
input { name: "a" data_type: TYPE_BOOL dims: 1 }
output { name: "b" data_type: TYPE_BOOL dims: 1 }
"""


def test_a_repository_in_order_passes(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(repository)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("echo: ok\n")
    assert text.endswith("\n1 model, 0 problems\n")


def test_the_page_about_it_shows_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs/check.md"
    (command,) = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    flip, flop, printed, printed_alone = re.findall(
        r"```\n(.*?)```", page.read_text().replace(f"```sh\n{command}```", ""), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    subprocess.run(["sh", "-ec", command], check=True, timeout=10)
    Path("models/flip/config.pbtxt").write_text(flip)
    Path("models/flop/config.pbtxt").write_text(flop)
    assert main(["check", "models"]) == 1
    assert capsys.readouterr().out == printed
    assert main(["check", "models/flip"]) == 0
    assert capsys.readouterr().out == printed_alone


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "the following arguments are required: path"),
        (["--jsn", "x"], "unrecognized option '--jsn'; did you mean '--json'?"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["check", *words])
    told = capsys.readouterr()
    assert (leaving.value.code, told.out) == (1, "")
    assert told.err.startswith("Usage: headrace check [options] <path> ...   (headrace check --help lists them)\n\n")
    assert text in told.err


def test_a_repository_in_a_cloud_is_named_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "s3://bucket/models"]) == 1
    assert capsys.readouterr().err.startswith("repository 's3://bucket/models' cannot be read: ")


def test_a_parent_of_a_repository_is_refused_with_the_repository(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(6):
        (tmp_path / "parent" / f"other{number}").mkdir(parents=True)
    folder = write(tmp_path / "parent" / "other3", "m", "")
    assert main(["check", str(tmp_path / "parent")]) == 1
    printed = capsys.readouterr()
    inner = tmp_path / "parent" / "other3"
    assert printed.err == f"'{tmp_path / 'parent'}' holds no models, but '{inner}' does: name that one\n"
    assert not printed.out
    (tmp_path / "parent" / "one" / "1").mkdir(parents=True)
    assert main(["check", str(tmp_path / "parent")]) == 1
    assert "one: 1 problem" in capsys.readouterr().out
    assert folder.exists()


def test_a_misspelt_field_is_placed_and_the_nearest_named(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(repository, "bad", 'backend: "identity"\n  max_bach_size: 4\n')
    code, found = check(capsys, str(repository))
    (problem,) = found["bad"]["problems"]
    assert code == 1
    assert (problem["file"], problem["line"], problem["column"]) == (str(path), 2, 3)
    assert problem["field"] == ""
    assert problem["message"] == "ModelConfig has no field 'max_bach_size'; did you mean 'max_batch_size'?"


def test_a_wrong_value_is_placed_by_the_word_that_is_wrong(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(repository, "bad", 'max_batch_size: 4\nbackend: "idenity"\n')
    _, found = check(capsys, str(repository))
    (problem,) = found["bad"]["problems"]
    assert (problem["line"], problem["column"]) == (2, 10)
    assert "did you mean 'identity'?" in problem["message"]


def test_one_bad_config_does_not_hide_the_others(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, "bad", "{")
    write(repository, "worse", 'backend: "nowhere"')
    _, found = check(capsys, str(repository))
    assert {name: len(one["problems"]) for name, one in found.items()} == {"bad": 1, "echo": 0, "worse": 1}


def test_what_was_filled_in_is_shown_with_its_source(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = (repository / "echo" / "config.pbtxt").read_text() + "max_batch_size: 4 dynamic_batching { }"
    write(repository, "batched", config)
    _, found = check(capsys, str(repository))
    filled = {one["field"]: (one["value"], one["source"]) for one in found["batched"]["completed"]}
    assert filled["name"] == ("batched", "Headrace")
    assert filled["dynamic_batching.preferred_batch_size"] == ("[4]", "Headrace")
    assert "backend" not in filled


@pytest.mark.parametrize("words", [(), ("--no-load",)])
def test_what_has_no_effect_is_noted_and_is_no_problem(
    words: tuple[str, ...], repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Identity, "engine_fields", ("model_operations",))
    config = (repository / "echo" / "config.pbtxt").read_text().rstrip() + "\noptimization { graph { level: 1 } }\n"
    path = write(repository, "graph", config)
    line, text = config.count("\n"), "optimization.graph has no effect: backend 'identity' does not act on it"
    code, found = check(capsys, *words, str(repository))
    assert (code, found["echo"]["notes"], found["graph"]["problems"]) == (0, [], [])
    assert [(one["line"], one["field"], one["message"]) for one in found["graph"]["notes"]] == [
        (line, "optimization.graph", text)
    ]
    assert main(["check", *words, str(repository)]) == 0
    assert f"graph: ok\n  note: {path}:{line}:16: {text}\n" in capsys.readouterr().out


def test_strict_takes_no_config_for_a_problem(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "bare" / "1").mkdir(parents=True)
    _, found = check(capsys, str(repository), "--strict")
    assert found["bare"]["problems"]


def test_a_model_of_two_repositories_is_a_problem(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "second", "echo", "")
    _, found = check(capsys, str(repository), str(tmp_path / "second"))
    assert "model appears in two or more repositories" in found["echo"]["problems"][0]["message"]


def test_no_directory_is_one_line_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none")]) == 1
    assert "repository path is not a valid directory" in capsys.readouterr().err


def test_a_config_name_that_leaves_the_directory_is_one_line_and_exit_1(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(repository), "--model-config-name=../x"]) == 1
    assert capsys.readouterr().err == "model config name '../x' must be a file name without directories\n"


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


def test_what_no_field_is_at_fault_for_has_no_place(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def missing_scheduler(name: str, distribution: str) -> str:
    return (
        f"Models with '{name}' need the distribution {distribution}: pip install {distribution}; no plugin provides "
        f"scheduler '{name}'; installed: direct, dynamic_batching"
    )


def test_a_scheduler_that_is_not_installed_is_said_and_the_rest_is_checked(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(repository, "seq", 'backend: "identity"\nmax_batch_size: -1\nsequence_batching { direct { } }')
    write(repository, "ens", 'platform: "ensemble"\nensemble_scheduling {\n  step { model_name: "a" }\n}')
    _, found = check(capsys, "--plugins=builtins", str(repository))
    assert placed(found["seq"]) == [
        (2, 17, "max_batch_size", "'max_batch_size' must be non-negative value for seq"),
        (
            3,
            1,
            "sequence_batching",
            missing_scheduler("sequence_batching", "headrace-sequence"),
        ),
    ]
    assert found["seq"]["problems"][1]["code"] == "Unsupported"
    assert placed(found["ens"]) == [
        (
            2,
            1,
            "ensemble_scheduling",
            missing_scheduler("ensemble_scheduling", "headrace-ensemble"),
        ),
        (3, 3, "ensemble_scheduling.step[0].input_map", "must specify 'input_map' in step 0 of ensemble 'ens'"),
        (3, 3, "ensemble_scheduling.step[0].output_map", "must specify 'output_map' in step 0 of ensemble 'ens'"),
    ]
    assert found["echo"]["problems"] == []


def test_a_backend_that_is_missing_does_not_hide_what_is_written_wrong(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backend might have filled in the data type, so its absence is no problem here."""
    write(repository, "bad", 'input { name: "x" dims: 0 }\nbackend: "dali"')
    _, found = check(capsys, str(repository))
    assert [(line, column, field) for line, column, field, _ in placed(found["bad"])] == [
        (1, 25, "input[0].dims"),
        (2, 10, "backend"),
    ]


def test_a_wrong_platform_is_one_problem(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, "bad", 'platform: "caffe2" input { name: "x" }')
    _, found = check(capsys, str(repository))
    assert placed(found["bad"]) == [(1, 11, "platform", "unexpected platform type 'caffe2' for bad")]


def test_a_label_file_that_is_missing_is_placed_at_its_name(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_what_a_backend_filled_in_wrongly_has_no_place(
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


def test_a_device_that_the_backend_does_not_run_on_is_placed_at_its_group(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.inspection.inspector.available_gpus", lambda: (0,))
    monkeypatch.setattr("headrace.models.configuring.available_gpus", lambda: (0,))
    write(repository, "bad", CONFIG + "instance_group [ { kind: KIND_CPU },\n { kind: KIND_GPU } ]")
    _, found = check(capsys, str(repository))
    assert [one[:3] for one in placed(found["bad"])] == [(6, 10, "instance_group[1].kind")]


def test_a_label_file_with_nul_in_its_name_is_one_problem(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = 'output { name: "b" data_type: TYPE_BOOL dims: 1\nlabel_filename: "\\0" }'
    write(repository, "bad", f'backend: "identity" {output}')
    _, found = check(capsys, str(repository))
    assert [one[:3] for one in placed(found["bad"])] == [(2, 17, "output[0].label_filename")]


def test_names_with_control_characters_cannot_draw_on_the_terminal(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(repository, "a\x1b[2Jb", "{")
    main(["check", str(repository)])
    assert "\x1b" not in capsys.readouterr().out


def test_colours_are_for_terminals(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    main(["check", str(repository)])
    assert "\x1b[32mok\x1b[0m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main(["check", str(repository)])
    assert "\x1b" not in capsys.readouterr().out


# ---------------------------------------------------------------------------- what only a load can tell

#: A backend that prints, and refuses the models whose name begins with "broken".
BACKEND = """
import os
from headrace import Backend, Instance, LoadError, hookimpl

class Echo(Instance):
    def execute(self, inputs):
        if (inputs["a"] > 0.5).all():
            raise ValueError("too much")
        return {"b": inputs["a"]}

class Picky(Backend):
    name = "picky"
    def load(self, model):
        print("printed by", model.name)
        os.write(1, b"written to stdout")
        if model.name.startswith("broken"):
            raise LoadError(f"ValueError: boom\\n\\nAt:\\n  1/model.py(3): initialize\\n")
        return Echo()

@hookimpl
def register_backends():
    return [Picky]
"""
PICKY = CONFIG.replace("identity", "picky").replace("TYPE_BOOL", "TYPE_FP32")


def checked(headrace: Callable[..., Any], *words: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the reports and stderr of a process."""
    process = headrace("check", "--json", *words)
    code, stderr = process.finish()
    return code, {found["model"]: found for found in json.loads(process.popen.stdout.read())}, stderr


def test_a_model_that_does_not_load_or_warm_up_is_a_problem(
    repository: Path, headrace: Callable[..., Any], distribute: Callable[[str, str], None]
) -> None:
    distribute("picky", BACKEND)
    write(repository, "broken", PICKY)
    (repository / "broken" / "1" / "model.py").write_text("1\n2\n3\n")
    warm = 'model_warmup { name: "w" batch_size: 1 inputs { key: "a" value { data_type: TYPE_FP32 dims: 1 %s } } }'
    write(repository, "cold", PICKY + warm % 'input_data_file: "one"')
    (repository / "cold" / "warmup").mkdir()
    (repository / "cold" / "warmup" / "one").write_bytes(struct.pack("f", 1.0))
    write(repository, "warm", PICKY + warm % "zero_data: true")
    code, found, stderr = checked(headrace, str(repository))
    assert code == 1
    assert found["warm"]["problems"] == found["echo"]["problems"] == []
    (problem,) = found["broken"]["problems"]
    assert (problem["file"], problem["line"]) == (str(repository / "broken" / "1" / "model.py"), 3)
    assert problem["message"].startswith("ValueError: boom")
    (problem,) = found["cold"]["problems"]
    assert (problem["field"], problem["line"]) == ("model_warmup", 5)
    assert "failed to run warmup sample 'w'" in problem["message"]
    # What models print is not among the reports, wherever they print it.
    assert "printed by warm" in stderr
    assert "written to stdout" in stderr


def test_no_load_starts_no_engine(
    repository: Path, headrace: Callable[..., Any], distribute: Callable[[str, str], None]
) -> None:
    distribute("picky", BACKEND.replace("def load", "def complete_config(self, model):\n        1 / 0\n    def load"))
    write(repository, "broken", PICKY)
    write(repository, "incomplete", 'backend: "picky"')
    write(repository, "wrong", PICKY.replace("dims: 1", "dims: 0", 1))
    code, found, stderr = checked(headrace, "--no-load", str(repository))
    assert {name: len(one["problems"]) for name, one in found.items()} == {
        "broken": 0, "echo": 0, "incomplete": 0, "wrong": 1,
    }  # fmt: skip
    assert (code, stderr) == (1, "")


def test_a_model_that_could_never_have_its_resources_is_a_problem_where_they_are_limited(
    repository: Path, headrace: Callable[..., Any]
) -> None:
    asks = 'rate_limiter { resources { name: "R" count: 3 } }'
    tensors = "data_type: TYPE_FP32 dims: 1"
    io = f'input {{ name: "x" {tensors} }} output {{ name: "y" {tensors} }}'
    write(repository, "greedy", f'backend: "identity" {io} instance_group {{ kind: KIND_CPU {asks} }}')
    limited = ["--rate-limit=execution_count", "--rate-limit-resource=R:2"]
    assert checked(headrace, str(repository))[1]["greedy"]["problems"] == []
    assert checked(headrace, "--rate-limit=execution_count", str(repository))[1]["greedy"]["problems"] == []
    (problem,) = checked(headrace, *limited, str(repository))[1]["greedy"]["problems"]
    assert problem["message"].startswith('Resource count for "R" is limited to 2')
    code, stderr = headrace("check", "--rate-limit-resource=R:x", str(repository)).finish()
    assert (code, stderr) == (
        1,
        'Bad option: "--rate-limit-resource".\nInvalid option value. Got x\n',
    )


@pytest.mark.parametrize("words", [[], ["--no-load"]])
def test_a_resource_that_one_model_has_per_device_and_another_as_a_whole_is_a_problem_of_both(
    repository: Path, headrace: Callable[..., Any], words: list[str]
) -> None:
    tensors = "data_type: TYPE_FP32 dims: 1"
    io = f'input {{ name: "x" {tensors} }}\noutput {{ name: "y" {tensors} }}'
    group = 'instance_group {{ kind: KIND_CPU\nrate_limiter {{ resources {{ name: "R" {} }} }} }}'
    says = {"a": "count: 1", "b": "count: 1 global: true", "c": "count: 1"}
    for name, said in says.items():
        write(repository, name, f'backend: "identity" {io}\n{group.format(said)}')
    limited = [*words, "--rate-limit=execution_count"]
    assert not any(each["problems"] for each in checked(headrace, *words, str(repository))[1].values())
    code, found, _ = checked(headrace, *limited, str(repository))
    told = {name: [(each["line"], each["message"]) for each in found[name]["problems"]] for name in found}
    twice = 'Resource "R" is present as both global and device-specific resource in the model configuration. '
    of_a_device = [(4, twice + "Here it is per device, and model 'b' has it global")]
    assert (code, told) == (
        1,
        {
            "a": of_a_device,
            "b": [(4, twice + "Here it is global, and model 'a' has it per device")],
            "c": of_a_device,
            "echo": [],
        },
    )
    assert checked(headrace, *limited, str(repository / "a"))[0] == 0


def test_no_load_judges_padding_beside_inputs_and_outputs_that_are_written(
    repository: Path, headrace: Callable[..., Any]
) -> None:
    dims = "data_type: TYPE_FP32 dims: -1"
    padding = 'parameters { key: "padding" value { string_value: "{}" } }'
    io = f'input {{ name: "x" {dims} }} output {{ name: "y" {dims} }}'
    write(repository, "written", f'backend: "identity" max_batch_size: 4 {io} {padding}')
    write(repository, "incomplete", f'backend: "identity" max_batch_size: 4 {padding}')
    _, found, _ = checked(headrace, "--no-load", str(repository))
    (problem,) = found["written"]["problems"]
    assert problem["field"] == "parameters['padding']"
    assert problem["message"].endswith("it has neither 'pad' nor 'pad_batch_to'")
    assert found["incomplete"]["problems"] == []


def test_a_directory_of_one_model_is_that_model(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, "bad", "{")
    assert main(["check", str(repository / "echo")]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("echo: ok\n")
    assert told.out.endswith("\n1 model, 0 problems\n")
    assert told.err == f"'{repository / 'echo'}' is a model, not a repository: this model alone is checked\n"
    assert main(["check", str(repository / "bad")]) == 1


@pytest.mark.parametrize(
    ("files", "is_one"),
    [
        (["config.pbtxt"], True),
        (["1/model.onnx"], True),
        (["1/model.onnx", "2/model.onnx", "labels.txt"], True),
        (["echo/config.pbtxt", "echo/1/x"], False),
        (["1/config.pbtxt", "1/1/x"], False),  # a model called 1
        (["2024/1/model.onnx"], False),
        ([], False),
    ],
)
def test_a_model_is_told_from_a_repository(files: list[str], is_one: bool, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert is_model(tmp_path) is is_one
    assert not is_model(tmp_path / "nowhere")


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
def test_an_error_is_placed_in_the_file_that_it_names(message: str, line: int, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.py").touch()
    assert locate(message, tmp_path, 1, "model.py") == (tmp_path / "1" / "model.py", line)
    assert locate("failed", tmp_path, 1, "") == (tmp_path / "1", 0)
