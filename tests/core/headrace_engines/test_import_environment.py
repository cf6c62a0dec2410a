"""The environment variables while an engine is imported, and afterwards."""

from __future__ import annotations

import os
import threading
from importlib import import_module

import pytest

from headrace_engines import import_environment, wait_policy

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "TOY_OFFLINE")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def shown() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


@pytest.mark.parametrize(
    ("before", "during"),
    [
        ({}, {"OMP_WAIT_POLICY": "passive", "TOY_OFFLINE": "1"}),
        ({"OMP_WAIT_POLICY": ""}, {"OMP_WAIT_POLICY": "passive", "TOY_OFFLINE": "1"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active", "TOY_OFFLINE": "1"}),
        ({"KMP_BLOCKTIME": "7"}, {"KMP_BLOCKTIME": "7", "TOY_OFFLINE": "1"}),
        ({"TOY_OFFLINE": "0"}, {"OMP_WAIT_POLICY": "passive", "TOY_OFFLINE": "0"}),
    ],
)
def test_variables_of_the_operator_stay_and_others_are_removed(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], during: dict[str, str]
) -> None:
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    with import_environment({"TOY_OFFLINE": "1"}):
        assert shown() == during
    assert shown() == before


def test_nothing_is_left_of_an_engine_that_cannot_be_imported() -> None:
    with pytest.raises(ModuleNotFoundError), import_environment():
        import_module("toy_engine_that_is_not_there")
    assert shown() == {}


def test_a_process_of_a_model_gets_the_policy_unless_the_operator_has_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait_policy() == {"OMP_WAIT_POLICY": "passive"}
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    assert wait_policy() == {}


def test_two_engines_are_imported_one_after_the_other() -> None:
    """The first to end would otherwise remove the variables of the second."""
    started, seen = threading.Event(), list[dict[str, str]]()

    def second() -> None:
        started.set()
        with import_environment():
            seen.append(shown())

    thread = threading.Thread(target=second)
    with import_environment():
        thread.start()
        assert started.wait(60)
        thread.join(0.05)
        assert seen == []
    thread.join(60)
    assert seen == [{"OMP_WAIT_POLICY": "passive"}]
    assert shown() == {}
