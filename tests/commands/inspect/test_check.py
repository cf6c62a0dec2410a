"""``headrace check``: what it prints, its arguments and its exit codes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.identity import Identity
from headrace_cli import main
from tests.commands.inspect.checking import check, checked, placed, write


def test_a_valid_repository_passes(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(repository)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("echo: ok\n")
    assert text.endswith("\n1 model, 0 problems\n")


def test_the_documentation_shows_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs/check.md"
    shell = re.compile(r"```sh\n(.*?)```", re.DOTALL)
    _, command = shell.findall(page.read_text())
    flip, flop, printed, printed_alone = re.findall(r"```\n(.*?)```", shell.sub("", page.read_text()), re.DOTALL)
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
    with pytest.raises(SystemExit) as error:
        main(["check", *words])
    captured = capsys.readouterr()
    assert (error.value.code, captured.out) == (1, "")
    assert captured.err.startswith("Usage: headrace check [options] <path> ...")
    assert text in captured.err


def test_a_storage_without_a_plugin_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "nowhere://user:password@bucket/models"]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("no plugin provides storage 'nowhere'")
    assert "password" not in stderr


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


def test_one_bad_config_does_not_hide_the_others(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, "bad", "{")
    write(repository, "worse", 'backend: "nowhere"')
    _, found = check(capsys, str(repository))
    assert {name: len(one["problems"]) for name, one in found.items()} == {"bad": 1, "echo": 0, "worse": 1}


@pytest.mark.parametrize("words", [(), ("--no-load",)])
def test_a_setting_without_effect_is_a_note_and_no_problem(
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


def test_strict_reports_a_missing_config_as_a_problem(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "bare" / "1").mkdir(parents=True)
    _, found = check(capsys, str(repository), "--strict")
    assert found["bare"]["problems"]


def test_a_model_in_two_repositories_is_a_problem(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "second", "echo", "")
    _, found = check(capsys, str(repository), str(tmp_path / "second"))
    assert "model appears in two or more repositories" in found["echo"]["problems"][0]["message"]


def test_no_directory_is_one_line_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none")]) == 1
    assert "repository path is not a valid directory" in capsys.readouterr().err


def test_a_config_name_outside_the_directory_exits_1_with_one_line(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(repository), "--model-config-name=../x"]) == 1
    assert capsys.readouterr().err == "model config name '../x' must be a file name without directories\n"


def missing_scheduler(name: str, distribution: str) -> str:
    return (
        f"Models with '{name}' need the distribution {distribution}: pip install {distribution}; no plugin provides "
        f"scheduler '{name}'; installed: direct, dynamic_batching"
    )


def test_a_missing_scheduler_is_named_and_the_rest_is_checked(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(repository, "seq", 'backend: "identity"\nmax_batch_size: -1\nsequence_batching { direct { } }')
    write(
        repository,
        "ens",
        'platform: "ensemble"\nensemble_scheduling {\n  step { }\n}\ninput { name: "x" data_type: TYPE_FP32 dims: 0 }',
    )
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
        (
            5,
            46,
            "input[0].dims",
            "model input 'x' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for ens",
        ),
    ]
    assert found["echo"]["problems"] == []


def test_a_missing_backend_does_not_hide_config_errors(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The backend might have completed the data type, so its absence is no problem."""
    write(repository, "bad", 'input { name: "x" data_type: TYPE_FP32 dims: 0 }\nbackend: "dali"')
    _, found = check(capsys, str(repository))
    assert [(line, column, field) for line, column, field, _ in placed(found["bad"])] == [
        (1, 46, "input[0].dims"),
        (2, 10, "backend"),
    ]


def test_a_wrong_platform_is_one_problem(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, "bad", 'platform: "caffe2" input { name: "x" }')
    _, found = check(capsys, str(repository))
    assert placed(found["bad"]) == [(1, 11, "platform", "unexpected platform type 'caffe2' for bad")]


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


def test_padding_is_checked_without_a_load_if_the_io_is_written(repository: Path, headrace: Callable[..., Any]) -> None:
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


def test_the_directory_of_one_model_is_accepted(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, "bad", "{")
    assert main(["check", str(repository / "echo")]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("echo: ok\n")
    assert captured.out.endswith("\n1 model, 0 problems\n")
    assert captured.err == f"'{repository / 'echo'}' is a model, not a repository: this model alone is checked\n"
    assert main(["check", str(repository / "bad")]) == 1
