"""Plugins found by entry point: tiny distributions written to disk and put on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import hookspecs
from penstock.backends.base import Backend
from penstock.config.options import ServerOptions
from penstock.errors import LoadError, PluginError
from penstock.models.parts import make_backend
from penstock.plugins import PluginInfo, Plugins

Install = Callable[..., None]

BACKEND = """
from penstock import Backend, Instance, hookimpl

class Toy(Backend):
    name = "{name}"
    def load(self, model):
        raise NotImplementedError

@hookimpl
def register_backends():
    return [Toy]
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with one module and one entry point on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(distribution: str, entry: str, source: str) -> None:
        module = distribution.replace("-", "_")
        monkeypatch.delitem(sys.modules, module, raising=False)
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[penstock]\n{entry} = {module}\n")

    return write


def info(plugins: Plugins, name: str) -> PluginInfo:
    (found,) = [plugin for plugin in plugins.plugins if plugin.name == name]
    return found


def test_an_installed_plugin_is_found_with_its_version_and_parts(install: Install) -> None:
    install("penstock-toy", "toy", BACKEND.format(name="toy"))
    plugins = Plugins.discover()
    assert plugins.backends.get("toy").name == "toy"
    found = info(plugins, "toy")
    assert (found.distribution, found.version, found.parts) == ("penstock-toy", "1.2", ["backend toy"])


def test_the_built_in_parts_come_through_the_same_hooks() -> None:
    parts = info(Plugins.discover(()), "builtins").parts
    assert {"backend identity", "scheduler direct", "scheduler dynamic_batching"} <= set(parts)
    assert {"frontend http", "frontend grpc", "frontend metrics"} <= set(parts)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_engine", "ModuleNotFoundError: No module named 'no_such_engine'"),
        ("raise RuntimeError('half installed')", "RuntimeError: half installed"),
        (
            "from penstock import hookimpl\n@hookimpl\ndef register_backend():\n    return []",
            "there is no hook 'register_backend'; did you mean 'register_backends'?",
        ),
        ("from penstock import hookimpl\n@hookimpl\ndef register_backends(extra):\n    return []", "extra"),
        ("from penstock import hookimpl\n@hookimpl\ndef register_backends():\n    return [1]", "name"),
    ],
)
def test_a_broken_plugin_stops_only_the_model_that_needs_it(install: Install, source: str, reason: str) -> None:
    install("penstock-sick", "sick", source)
    plugins = Plugins.discover()
    error = info(plugins, "sick").error
    assert error is not None
    assert reason in error
    assert plugins.backends.get("identity").name == "identity"
    with pytest.raises(LoadError) as refusal:
        plugins.backends.get("sick")
    assert "'sick' of penstock-sick 1.2 is broken" in refusal.value.message
    assert reason in refusal.value.message


def test_two_plugins_that_claim_one_name_are_both_named(install: Install) -> None:
    for distribution in ("penstock-one", "penstock-two"):
        install(distribution, distribution[9:], BACKEND.format(name="twin"))
    with pytest.raises(LoadError, match=r"'one' of penstock-one 1\.2 and 'two' of penstock-two 1\.2"):
        Plugins.discover().backends.get("twin")


def test_an_allow_list_leaves_the_others_unimported(install: Install) -> None:
    install("penstock-toy", "toy", "raise SystemError('imported')")
    plugins = Plugins.discover(())
    assert [plugin.name for plugin in plugins.plugins] == ["builtins"]


def test_an_unknown_backend_is_answered_with_the_nearest_and_the_installed() -> None:
    with pytest.raises(LoadError, match=r"did you mean 'identity'\?.*installed: .*identity"):
        Plugins.discover(()).backends.get("identiti")


def test_every_hook_is_documented_and_typed() -> None:
    hooks: dict[str, Any] = {n: f for n, f in vars(hookspecs).items() if hasattr(f, "penstock_spec")}
    assert len(hooks) >= 8
    for name, hook in hooks.items():
        assert len(hook.__doc__ or "") > 80, name
        assert "return" in hook.__annotations__, name


FINDER = """
from penstock import Backend, hookimpl

class Found(Backend):
    name = "found"
    def load(self, model):
        raise NotImplementedError

@hookimpl
def find_backend(name, options):
    if name == "sick":
        raise ValueError("lost")
    return Found if name in ("identity", options.backend_directory) else None
"""


def make(name: str) -> Backend:
    plugins = Plugins.discover()
    options = ServerOptions(backend_directory="there", backend_config={"there": {"key": "value"}})
    return make_backend(name, plugins.backends, plugins.hook, options)


def test_a_backend_that_nobody_has_registered_is_asked_for_by_name(install: Install) -> None:
    install("penstock-finder", "finder", FINDER)
    found = make("there")
    assert (found.name, found.options) == ("found", {"key": "value"})


def test_a_registered_backend_goes_before_one_that_would_be_found(install: Install) -> None:
    install("penstock-finder", "finder", FINDER)
    assert make("identity").name == "identity"


def test_a_backend_that_nobody_knows_is_told_as_before(install: Install) -> None:
    install("penstock-finder", "finder", FINDER)
    with pytest.raises(LoadError, match="no plugin provides backend 'nobody'"):
        make("nobody")


def test_a_plugin_that_raises_while_it_looks_is_told(install: Install) -> None:
    install("penstock-finder", "finder", FINDER)
    with pytest.raises(PluginError, match="a plugin failed to find backend 'sick': ValueError: lost"):
        make("sick")
