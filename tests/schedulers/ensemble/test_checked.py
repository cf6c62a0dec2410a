"""``headrace check`` of ensembles: errors of their configs are reported with places, without a load."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace import Backend
from headrace.backends.identity import Identity
from headrace_cli import main

from .conftest import Write, ensemble, identity, step


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(backend: Backend, model: Any) -> Any:
        raise AssertionError(f"'{model.name}' is loaded")

    monkeypatch.setattr(Identity, "load", load)


def found(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[tuple[int, str, str]]]:
    main(["check", *words, "--json"])
    return {
        report["model"]: [(one["line"], one["field"], one["message"]) for one in report["problems"]]
        for report in json.loads(capsys.readouterr().out)
    }


def test_incompatible_models_are_reported_without_a_load(
    write: Write, unloaded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write("one", identity())
    write("wide", identity(dims="3"))
    write("good", ensemble([step("one", "a=x", "b=y")]))
    write("lost", ensemble([step("gone", "a=x", "b=y")]))
    write("first", ensemble([step("second", "x=x", "y=y")]))
    write("second", ensemble([step("first", "x=x", "y=y")]))
    path = write("bad", ensemble([step("one", "a=x", "b=m"), "\n" + step("wide", "a=m", "b=y")]))
    problems = found(capsys, "--no-load", str(path.parent))
    assert [name for name in sorted(problems) if not problems[name]] == ["good", "one", "wide"]
    ((line, field, message),) = problems["bad"]
    assert (line, field) == (2, "ensemble_scheduling.step[1].input_map['a']")
    assert message.startswith(
        "in ensemble bad, ensemble tensor m: inconsistent shape: [-1,2] is inferred from model one while"
    )
    assert problems["lost"][0][2] == "ensemble lost contains models that are not available or ambiguous: gone"
    assert problems["first"][0][2] == "circular dependency between ensembles: first -> ... -> second -> first"


def test_a_model_with_an_incomplete_config_is_checked_at_its_load(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("one", 'backend: "onnxruntime"')
    path = write("e", ensemble([step("one", "a=x", "b=y")]))
    assert found(capsys, "--no-load", str(path.parent))["e"] == []
    (problem,) = found(capsys, str(path))["e"]
    assert "ensemble 'e' depends on 'one' which has no loaded version" in problem[2]


def test_the_directory_of_an_ensemble_is_checked_with_its_models(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("one", identity())
    path = write("e", ensemble([step("one", "a=x", "b=y")]))
    assert found(capsys, str(path)) == {"e": []}
