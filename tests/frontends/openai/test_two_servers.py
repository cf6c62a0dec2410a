"""Two servers in one process: each knows its own models only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        assert model.text.template is not None
        assert [each.name for each in two.all()] == []
        on_loop(second, second.unload("same"))
        assert one.find("same") is model
        on_loop(first, first.unload("same"))
        wait_until(lambda: "same" not in one._kept, "it is forgotten")
        assert not has(one, "same")


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
