"""Two servers in one process: each knows its own models only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import HeadraceError
from headrace_openai.catalog import ModelCatalog
from headrace_testing.serving import on_loop, serve
from tests.frontends.openai.model_files import PLAIN, TEMPLATE, scripted_config


def test_a_model_that_one_server_unloads_stays_in_another(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    chat = {"chat_template": "template.jinja", "tool_call_parser": "hermes"}
    for folder, config in (("one", scripted_config("messages", parameters=chat)), ("two", PLAIN)):
        (tmp_path / folder / "same/1").mkdir(parents=True)
        (tmp_path / folder / "same/config.pbtxt").write_text(config)
        (tmp_path / folder / "same/template.jinja").write_text(TEMPLATE)
    (tmp_path / "one/same/1/model.py").write_text("class TritonPythonModel:\n    def execute(self, requests): ...\n")
    explicit: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("same",)}
    with serve(tmp_path / "one", **explicit) as first, serve(tmp_path / "two", **explicit) as second:
        one, two = catalog_of(first), catalog_of(second)
        model = one.find("same")
        assert model.text_model is not None
        assert model.text_model.template is not None
        assert [each.name for each in two.all()] == []
        on_loop(second, second.unload("same"))
        assert one.find("same") is model
        on_loop(first, first.unload("same"))
        wait_until(lambda: "same" not in one._kept, "it is forgotten")
        assert not has(one, "same")


def test_the_handlers_of_a_task_are_imported_when_a_model_of_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "headrace_openai.openai_extension.import_module",
        lambda name: imported.append((name.rpartition(".")[2], threading.get_ident())),
    )
    with serve(tmp_path):
        assert imported == []
    (tmp_path / "text/1").mkdir(parents=True)
    (tmp_path / "text/config.pbtxt").write_text(
        """backend: "identity" input { name: "text_input" data_type: TYPE_STRING dims: 1 }
        output { name: "text_output" data_type: TYPE_STRING dims: 1 }"""
    )
    with serve(tmp_path) as server:
        event_loop = on_loop(server, this_thread())
    assert [name for name, _ in imported] == ["chat_routes", "completion_routes", "response_route"]
    assert event_loop not in {thread for _, thread in imported}


async def this_thread() -> int:
    return threading.get_ident()


def catalog_of(server: Any) -> ModelCatalog:
    (extension,) = [each for each in server.engine.extensions if each.name == "openai"]
    catalog: ModelCatalog = extension.models
    return catalog


def has(catalog: ModelCatalog, name: str) -> bool:
    try:
        catalog.find(name)
    except HeadraceError:
        return False
    return True
