"""The errors for a model that is not served. The texts are those of Triton 2.51."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace import HeadraceError, NotFound, Server, Unavailable
from headrace.models.serving_table import ServingTable

CONFIG = """
backend: "identity"
input { name: "x" data_type: TYPE_FP32 dims: [2] }
output { name: "y" data_type: TYPE_FP32 dims: [2] }
"""
UNKNOWN = "Request for unknown model: "


@pytest.mark.parametrize(
    ("name", "version", "reason"),
    [
        *((name, version, f"'{name}' is not found") for name in ("nobody", "bad") for version in ("", "1", "3")),
        ("good", "3", "'good' version 3 is not found"),
        ("empty", "", "'empty' has no available versions"),
        ("empty", "1", "'empty' version 1 is not found"),
        ("broken", "", "'broken' has no available versions"),
        ("broken", "1", "'broken' version 1 is not at ready state"),
        ("broken", "3", "'broken' version 3 is not found"),
    ],
)
def test_a_model_that_is_not_served_is_refused_in_tritons_words(
    name: str, version: str, reason: str, headrace_repository: Path, headrace_server: Callable[..., Server]
) -> None:
    """A model whose config is wrong is as unknown as one that does not exist."""
    for model, text in {
        "good": CONFIG,
        "bad": "foo: 3",
        "empty": CONFIG,
        "broken": CONFIG.replace("identity", "nobody"),
    }.items():
        (headrace_repository / model / ("1" if model != "empty" else "configs")).mkdir(parents=True)
        (headrace_repository / model / "config.pbtxt").write_text(text)
    server = headrace_server(exit_on_error=False)
    with pytest.raises(HeadraceError) as refusal:
        server.infer(name, {"x": [0, 0]}, version=version)
    assert refusal.value.message == UNKNOWN + reason


def records(*names: str) -> Any:
    """A version 1 of each model, whose view is its name."""
    return {
        name: SimpleNamespace(versions={1: SimpleNamespace(served=SimpleNamespace(view=name))}, counts={})
        for name in names
    }


def test_an_open_table_has_exactly_the_loaded_models() -> None:
    table: Any = ServingTable()
    table.update(records("old"), "old")
    with pytest.raises(Unavailable):
        table.resolve("old")
    table.open()
    assert table.resolve("old") == "old"
    both = records("old", "new")
    table.update(both, "new")
    assert (table.resolve("new", "1"), table.resolve("old")) == ("new", "old")
    del both["old"]
    table.update(both, "old")
    assert table.resolve("new", "1") == "new"
    with pytest.raises(NotFound):
        table.resolve("old")


def test_an_update_changes_the_versions_of_one_model_only() -> None:
    """A server of many models loads each of them in the same time."""
    table: Any = ServingTable()
    known = records("m", "other")
    known["m"].versions[2] = SimpleNamespace(served=SimpleNamespace(view="second"))
    table.update(known, "m")
    with pytest.raises(NotFound, match="'other' has no available versions"):
        table.resolve_loaded("other")
    assert (table.resolve_loaded("m"), table.resolve_loaded("m", "1")) == ("second", "m")
    known["m"].versions[2].served = None
    table.update(known, "m")
    assert table.resolve_loaded("m") == "m"
    with pytest.raises(Unavailable, match="version 2 is not at ready state"):
        table.resolve_loaded("m", "2")


@pytest.mark.parametrize("version", ["", "1", 1, "01"])
@pytest.mark.parametrize("find", ["served", "served_loaded", "resolve", "resolve_loaded"])
def test_a_model_is_found_by_every_form_of_its_version(find: str, version: str | int) -> None:
    table: Any = ServingTable()
    table.update(records("m"), "m")
    table.open()
    view = getattr(table, find)("m", version)
    assert (view if find.startswith("resolve") else view.view) == "m"
    with pytest.raises(NotFound):
        getattr(table, find)("m", "2")


@pytest.mark.parametrize(("find", "is_refused"), [("served", True), ("served_loaded", False), ("resolve", True)])
def test_before_the_table_is_open_only_those_inside_find_a_model(find: str, is_refused: bool) -> None:
    table: Any = ServingTable()
    table.update(records("m"), "m")
    if is_refused:
        with pytest.raises(Unavailable, match="its models are still being loaded"):
            getattr(table, find)("m")
    else:
        assert getattr(table, find)("m").view == "m"
