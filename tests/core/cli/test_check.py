"""``penstock check``: places, nearest names, completions, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main


def write(repository: Path, name: str, config: str) -> Path:
    (repository / name / "1").mkdir(parents=True)
    path = repository / name / "config.pbtxt"
    path.write_text(config)
    return path


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(["check", "--json", *words])
    return code, {found["model"]: found for found in json.loads(capsys.readouterr().out)}


def test_a_repository_in_order_passes(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(repository)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("echo: ok\n")
    assert text.endswith("\n1 model, 0 problems\n")


def test_a_misspelt_field_is_placed_and_the_nearest_named(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(repository, "bad", 'backend: "identity"\n  max_bach_size: 4\n')
    code, found = check(capsys, str(repository))
    (problem,) = found["bad"]["problems"]
    assert code == 1
    assert (problem["file"], problem["line"], problem["column"]) == (str(path), 2, 3)
    assert "did you mean 'max_batch_size'?" in problem["message"]


def test_a_wrong_value_is_placed_by_the_word_that_is_wrong(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(repository, "bad", 'max_batch_size: 4\nbackend: "idenity"\n')
    _, found = check(capsys, str(repository))
    (problem,) = found["bad"]["problems"]
    assert (problem["line"], problem["column"]) == (2, 11)
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
    assert filled["name"] == ("batched", "Penstock")
    assert filled["dynamic_batching.preferred_batch_size"] == ("[4]", "Penstock")
    assert "backend" not in filled


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
