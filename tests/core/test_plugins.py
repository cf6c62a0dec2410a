"""Plugins found by entry point: tiny distributions written to disk and put on the path."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace import hookspecs
from headrace.backends.base import Backend
from headrace.config.option_groups import OptionGroup
from headrace.config.options import ServerOptions
from headrace.engine import Phase
from headrace.errors import ConfigError, LoadError, PluginError
from headrace.models.configuring import make_backend
from headrace.plugins import Plugins
from headrace.registry import PluginInfo, Registry
from headrace.server import Server

Install = Callable[..., None]

BACKEND = """
from headrace import Backend, Instance, hookimpl

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
        (info / "entry_points.txt").write_text(f"[headrace]\n{entry} = {module}\n")

    return write


def info(plugins: Plugins, name: str) -> PluginInfo:
    (plugin_info,) = [plugin for plugin in plugins.plugins if plugin.name == name]
    return plugin_info


def test_an_installed_plugin_is_found_with_its_version_and_parts(install: Install) -> None:
    install("headrace-toy", "toy", BACKEND.format(name="toy"))
    plugins = Plugins.discover()
    assert plugins.backends.get("toy").name == "toy"
    plugin = info(plugins, "toy")
    assert (plugin.distribution, plugin.version, plugin.parts) == ("headrace-toy", "1.2", ["backend toy"])


def test_the_parts_of_core_are_registered_by_the_same_hooks_for_any_choice_of_plugins() -> None:
    plugins = Plugins.discover(())
    assert {"backend identity", "scheduler direct", "scheduler dynamic_batching"} <= set(
        info(plugins, "builtins").parts
    )
    assert info(plugins, "grpc").parts[:2] == ["frontend grpc", "extension grpc_inference"]
    assert info(plugins, "http").parts[:3] == ["frontend http", "frontend metrics", "extension http_statistics"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_engine", "ModuleNotFoundError: No module named 'no_such_engine'"),
        ("raise RuntimeError('half installed')", "RuntimeError: half installed"),
        (
            "from headrace import hookimpl\n@hookimpl\ndef register_backend():\n    return []",
            "there is no hook 'register_backend'; did you mean 'register_backends'?",
        ),
        ("from headrace import hookimpl\n@hookimpl\ndef register_backends(extra):\n    return []", "extra"),
        (
            "from headrace import hookimpl\n@hookimpl\ndef register_backends():\n    return [1]",
            "no subclass of Backend",
        ),
    ],
)
def test_a_broken_plugin_stops_only_the_model_that_needs_it(install: Install, source: str, reason: str) -> None:
    install("headrace-sick", "sick", source)
    plugins = Plugins.discover()
    error = info(plugins, "sick").error
    assert error is not None
    assert reason in error
    assert plugins.backends.get("identity").name == "identity"
    with pytest.raises(LoadError) as refusal:
        plugins.backends.get("sick")
    assert "'sick' of headrace-sick 1.2 is broken" in refusal.value.message
    assert reason in refusal.value.message


UNMARKED = """
from headrace import Backend, hookimpl

class Toy(Backend):
    name = "toy"
    def load(self, model):
        raise NotImplementedError

def register_backends():
    return [Toy]

def server_stopping(server):
    raise AssertionError("this is no hook")
"""


def test_a_function_that_lacks_hookimpl_is_named_and_not_called(install: Install) -> None:
    install("headrace-acme", "acme", UNMARKED)
    plugins = Plugins.discover(("acme",))
    plugins.notify("server_stopping", server=None)
    plugin = info(plugins, "acme")
    assert (plugin.error, plugin.parts) == (None, [])
    faults = [
        f"plugin 'acme' of headrace-acme 1.2 has a function '{name}' without @hookimpl, which is not called"
        for name in ("register_backends", "server_stopping")
    ]
    assert plugins.complaints == faults
    with pytest.raises(LoadError) as refusal:
        plugins.backends.get("toy")
    assert refusal.value.message.endswith(f"; {faults[0]}; {faults[1]}")
    with pytest.raises(LoadError, match=faults[0]):
        plugins.backends.get("acme")


def test_pluggy_calls_the_hooks_that_return_parts(install: Install) -> None:
    """So what pluggy offers works: another name for the function, and hooks that may not exist."""
    named = BACKEND.format(name="toy").replace("@hookimpl\ndef register_backends", MARKED)
    install("headrace-toy", "toy", f"{named}\n@hookimpl(optionalhook=True)\ndef of_a_later_version():\n    pass\n")
    plugins = Plugins.discover(("toy",))
    assert plugins.complaints == []
    assert info(plugins, "toy").parts == ["backend toy"]


def test_one_module_that_two_entry_points_name_counts_once(install: Install, tmp_path: Path) -> None:
    install("headrace-toy", "toy", BACKEND.format(name="toy"))
    (tmp_path / "headrace_toy-1.2.dist-info/entry_points.txt").write_text(
        "[headrace]\ntoy = headrace_toy\ntoy-again = headrace_toy\n"
    )
    plugins = Plugins.discover(("headrace-toy",))
    assert info(plugins, "toy-again").error == "ValueError: plugin 'headrace-toy:toy' is the same object"
    assert plugins.backends.get("toy").name == "toy"


LAZY = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return print
"""


def test_a_module_that_makes_its_names_up_has_the_hooks_that_it_lists(install: Install) -> None:
    install("headrace-toy", "toy", BACKEND.format(name="toy") + LAZY)
    assert Plugins.discover(("toy",)).complaints == []


MARKED = "@hookimpl(specname='register_backends')\ndef parts"


#: Brings a part of each kind and takes part in hooks, before a last line that is wrong.
WHOLE = (
    BACKEND.format(name="toy")
    + """
from headrace.schedulers.dynamic import DirectScheduler
from headrace_http.metrics_frontend import MetricsFrontend

class ToyScheduler(DirectScheduler):
    name = "toy"

class ToyFrontend(MetricsFrontend):
    name = "toy"

@hookimpl
def register_schedulers():
    return [ToyScheduler]

@hookimpl
def register_frontends():
    return [ToyFrontend]

@hookimpl
def find_backend(name):
    return Toy

@hookimpl
def server_started(server):
    server.toy = True
"""
)


@pytest.mark.parametrize(
    "fault",
    [
        "@hookimpl\ndef model_loadet(model):\n    pass",
        "@hookimpl\ndef model_loaded(model, colour):\n    pass",
        "@hookimpl\ndef register_frontends():\n    return None",
        "@hookimpl\ndef add_options():\n    return [ToyFrontend]",
        "raise SystemExit(3)",
        "import no_such_engine",
    ],
)
def test_a_broken_plugin_contributes_nothing(install: Install, fault: str) -> None:
    install("headrace-half", "half", f"{WHOLE}\n{fault}\n")
    plugins = Plugins.discover()
    broken = info(plugins, "half")
    assert (bool(broken.error), broken.parts) == (True, [])
    for registry in (plugins.backends, plugins.schedulers, plugins.frontends):
        assert "toy" not in registry.names()
        assert "toy" not in [part.name for part in registry]
    assert [
        impl for hook in vars(plugins.hook).values() for impl in hook.get_hookimpls() if "half" in impl.plugin_name
    ] == []


@pytest.mark.parametrize(
    ("distribution", "entry", "wanted"),
    [("headrace-toy", "engine", "toy"), ("Headrace_Toy", "engine", "toy"), ("toy-things", "toy", "toy"),
     ("headrace-my-toy", "engine", "my_toy")],
)  # fmt: skip
def test_a_model_gets_the_reason_of_a_broken_plugin_of_any_name(
    install: Install, distribution: str, entry: str, wanted: str
) -> None:
    install(distribution, entry, "import no_such_engine")
    with pytest.raises(LoadError, match="is broken: ModuleNotFoundError: No module named 'no_such_engine'"):
        Plugins.discover().backends.get(wanted)


def test_a_broken_plugin_is_found_by_the_parts_it_would_have_registered(install: Install) -> None:
    install("acme-engines", "acme", f"{WHOLE}\n@hookimpl\ndef model_loadet(model):\n    pass\n")
    plugins = Plugins.discover()
    for registry in (plugins.backends, plugins.schedulers, plugins.frontends):
        with pytest.raises(LoadError, match=r"'acme' of acme-engines 1\.2 is broken: .*model_loadet"):
            registry.get("toy")


def test_missing_part_is_refused_with_the_plugins_that_could_provide_it(install: Install) -> None:
    install("acme-engines", "acme", "import no_such_engine")
    with pytest.raises(LoadError, match=r"installed: .*; broken: 'acme' of acme-engines 1\.2 \(ModuleNotFoundError"):
        Plugins.discover().backends.get("tensorfly")


#: A class of each kind of part, by the hook that returns it.
PARTS = {
    "register_backends": "from headrace.backends.identity import Identity as Base",
    "register_schedulers": "from headrace.schedulers.dynamic import DirectScheduler as Base",
    "register_executors": "from headrace.executors.thread_kind import ThreadExecutors as Base",
    "register_frontends": "from headrace_http.metrics_frontend import MetricsFrontend as Base",
    "register_caches": "from headrace.caches.local import LocalCache as Base",
    "register_storages": "from headrace.storage.local_storage import LocalStorage as Base",
    "register_agents": "from headrace import RepositoryAgent as Base",
    "register_extensions": "from headrace import Extension as Base",
    "register_interceptors": "from headrace.frontends.access import RestrictedApis as Base",
    "register_commands": "from headrace_cli.plugins import ListPlugins as Base",
    "add_options": "from headrace import OptionGroup as Base",
}
TWIN = """
from dataclasses import dataclass
from headrace import hookimpl
{source}

@dataclass(frozen=True, init=False)  # as options must be
class Twin(Base):
    name = "{name}"

@hookimpl
def {hook}():
    return [Twin]
"""


def test_each_hook_that_returns_parts_has_one_registry() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith("register_")} | {"add_options"}
    assert sorted(registry.hook for registry in Plugins().registries) == sorted(hooks)


@pytest.mark.parametrize("registry", Plugins().registries, ids=lambda registry: registry.hook)
def test_two_plugins_that_claim_one_name_are_both_named(install: Install, registry: Registry[Any]) -> None:
    hook, kind = registry.hook, registry.kind
    name = "twin"
    for distribution in ("headrace-one", "headrace-two"):
        install(distribution, distribution[9:], TWIN.format(hook=hook, source=PARTS[hook], name=name))
    plugins = Plugins.discover()
    text = rf"{kind} '{name}' is registered by both 'one' of headrace-one 1\.2 and 'two' of headrace-two 1\.2"
    (filled,) = [each for each in plugins.registries if each.hook == hook]
    for look in (lambda: filled.get(name), lambda: list(filled)):
        with pytest.raises((LoadError, ConfigError), match=text):
            look()
    assert len(plugins.complaints) == 1
    for name in ("one", "two"):
        assert plugins.conflicts_of(info(plugins, name)) == plugins.complaints
    assert plugins.conflicts_of(info(plugins, "builtins")) == []


def test_a_second_frontend_of_a_name_stops_the_start_instead_of_making_both_vanish(
    install: Install, tmp_path: Path
) -> None:
    hook = "register_frontends"
    install("headrace-two", "two", TWIN.format(hook=hook, source=PARTS[hook], name="http"))

    async def scenario() -> None:
        (tmp_path / "models").mkdir()
        async with Server(tmp_path / "models", http_port=0, grpc_port=0, metrics_port=0) as server:
            with pytest.raises(LoadError, match=r"'http' is registered by both 'http' of headrace .* and 'two'"):
                await server.start_frontends()
            assert server.frontends == []

    asyncio.run(scenario())


LISTENER = """
from headrace import hookimpl

@hookimpl
def {hook}({argument}):
    {body}
"""


@pytest.mark.parametrize(
    ("hook", "argument"), [("server_stopping", "server"), ("model_loaded", "model"), ("model_unloaded", "model")]
)
def test_a_plugin_that_raises_does_not_stop_the_notification_of_others(
    install: Install, hook: str, argument: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    for name in ("one", "two", "three"):
        body = "raise ValueError('tired')" if name == "two" else f"{argument}.append('{name}')"
        install(f"headrace-{name}", name, LISTENER.format(hook=hook, argument=argument, body=body))
    Plugins.discover().notify(hook, **{argument: heard})
    assert sorted(heard) == ["one", "three"]
    assert f"plugin 'headrace-two:two' failed in {hook}" in caplog.text


OPTIONS = """
from dataclasses import dataclass
from headrace import OptionGroup, hookimpl

@dataclass(frozen=True)
class ToyOptions(OptionGroup):
    name = "toy"
    colour: {colour}
    depth: int = 3

    def __post_init__(self):
        if self.depth > 9:
            raise ValueError("too deep")

@hookimpl
def add_options():
    return [ToyOptions]
"""


def option_groups() -> list[Any]:
    """The groups of the toy; plugins that are installed may have others."""
    return [kind for kind in Plugins.discover().options if kind.name == "toy"]


def test_an_embedded_server_has_the_options_of_its_plugins(install: Install, tmp_path: Path) -> None:
    install("headrace-toy", "toy", OPTIONS.format(colour="str | None = None"))
    (kind,) = option_groups()
    group = Server(tmp_path).options.group(kind)
    assert (group.colour, group.depth) == (None, 3)
    assert info(Plugins.discover(), "toy").parts == ["options --toy-..."]
    options = kind(colour="red")
    assert Server(tmp_path, plugin_options=[options]).options.group(kind) is options
    with pytest.raises(LookupError, match="no plugin has added the options OptionGroup"):
        Server(tmp_path).options.group(OptionGroup)


def test_an_option_of_a_plugin_that_is_required_and_missing_is_named(install: Install, tmp_path: Path) -> None:
    install("headrace-toy", "toy", OPTIONS.format(colour="str"))
    with pytest.raises(ConfigError, match="--toy-colour must be specified"):
        Server(tmp_path)
    (kind,) = option_groups()
    assert Server(tmp_path, plugin_options=[kind(colour="red")]).phase is Phase.NEW


def test_options_that_no_plugin_has_added_are_named(install: Install, tmp_path: Path) -> None:
    install("headrace-toy", "toy", OPTIONS.format(colour="str = ''"))
    with pytest.raises(ConfigError, match=r"no plugin has the options OptionGroup; there are: .*ToyOptions"):
        Server(tmp_path, plugin_options=[OptionGroup()])


def test_two_groups_of_one_name_are_an_error_that_names_both(install: Install, tmp_path: Path) -> None:
    for name in ("one", "two"):
        install(f"headrace-{name}", name, OPTIONS.format(colour="str = ''"))
    with pytest.raises(ConfigError, match=r"'one' of headrace-one 1\.2 and 'two' of headrace-two"):
        Server(tmp_path)


def test_plugins_that_are_not_allowed_are_not_imported(install: Install) -> None:
    install("headrace-toy", "toy", "raise SystemError('imported')")
    plugins = Plugins.discover(())
    assert [plugin.name for plugin in plugins.plugins] == ["builtins", "commands", "grpc", "http", "processes"]


def test_an_unknown_backend_is_answered_with_the_nearest_and_the_installed() -> None:
    with pytest.raises(LoadError, match=r"did you mean 'identity'\?.*installed: .*identity"):
        Plugins.discover(()).backends.get("identiti")


def test_every_hook_is_documented_and_typed() -> None:
    hooks: dict[str, Any] = {n: f for n, f in vars(hookspecs).items() if hasattr(f, "headrace_spec")}
    assert len(hooks) >= 8
    for name, hook in hooks.items():
        assert len(hook.__doc__ or "") > 80, name
        assert "return" in hook.__annotations__, name


FINDER = """
from headrace import Backend, hookimpl

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


def test_an_unregistered_backend_is_requested_by_name(install: Install) -> None:
    install("headrace-finder", "finder", FINDER)
    backend = make("there")
    assert (backend.name, backend.options) == ("found", {"key": "value"})


def test_a_registered_backend_takes_precedence_over_find_backend(install: Install) -> None:
    install("headrace-finder", "finder", FINDER)
    assert make("identity").name == "identity"


def test_an_unknown_backend_is_reported_as_without_find_backend(install: Install) -> None:
    install("headrace-finder", "finder", FINDER)
    with pytest.raises(LoadError, match="no plugin provides backend 'nobody'"):
        make("nobody")


def test_a_plugin_that_raises_in_find_backend_is_reported(install: Install) -> None:
    install("headrace-finder", "finder", FINDER)
    with pytest.raises(PluginError, match="a plugin failed to find backend 'sick': ValueError: lost"):
        make("sick")


ROUTE = """
from headrace import Extension, ExtensionOperation, HttpReply, HttpRoute, hookimpl

class Toy(HttpRoute):
    name = "{name}"
    operation = ExtensionOperation("toy", "{category}")
    async def answer(self, call):
        return HttpReply(200)

class Toys(Extension):
    name = __name__
    adds = (Toy,)

@hookimpl
def register_extensions():
    return [Toys]
"""


def test_a_route_is_listed_by_its_method_and_path(install: Install) -> None:
    install("headrace-toy", "toy", ROUTE.format(name="GET /toys/{name}", category="metadata"))
    plugins = Plugins.discover(["toy"])
    assert info(plugins, "toy").parts == ["extension headrace_toy", "route GET /toys/{name}"]
    assert list(plugins.extensions)[-1].adds[0].name == "GET /toys/{name}"


@pytest.mark.parametrize(
    "other", ["GET /toys/{name}", "GET /toys/{other}", "POST /toys/bear", "GET /{any}/bear", "GET /toys/{version}"]
)
def test_two_routes_to_one_path_are_an_error_that_names_both(install: Install, tmp_path: Path, other: str) -> None:
    install("headrace-one", "one", ROUTE.format(name="GET /toys/{name}", category="metadata"))
    install("headrace-two", "two", ROUTE.format(name=other, category="metadata"))
    plugins = Plugins.discover()
    (complaint,) = plugins.complaints
    assert "'one' of headrace-one 1.2" in complaint
    assert "'two' of headrace-two 1.2" in complaint
    with pytest.raises(LoadError, match=r"headrace-one 1\.2 and 'two' of headrace-two"):
        list(plugins.extensions)

    async def listen() -> None:
        await Server(tmp_path, http_address="127.0.0.1", http_port=0, allow_grpc=False).start_frontends()

    with pytest.raises(LoadError, match=r"headrace-one 1\.2 and 'two' of headrace-two"):
        asyncio.run(listen())


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("POST /toys/{name}", "metadata"),
        ("PUT /toys/{name}", "inference"),
        ("GET /toys/{name}/parts", "inference"),
        ("GET /{any}/parts/x", "inference"),
    ],
)
def test_routes_that_no_path_leads_to_both_of_stand_beside_each_other(
    install: Install, name: str, category: str
) -> None:
    install("headrace-one", "one", ROUTE.format(name="GET /toys/{name}", category="metadata"))
    install("headrace-two", "two", ROUTE.format(name=name, category=category))
    plugins = Plugins.discover(["one", "two"])
    assert plugins.complaints == []
    assert {"headrace_one", "headrace_two"} <= {part.name for part in plugins.extensions}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("POST /v2/models/{name}/infer", "is one that Headrace itself answers, as 'POST /v2/models/{name}"),
        ("DELETE /v2/models/{name}", "as 'GET /v2/models/stats': one path fits both templates, and then their methods"),
        ("DELETE /v2/models/{name}/versions/7", "is one that Headrace itself answers"),
        ("GET /{all}/health/{what}", "is one that Headrace itself answers, as 'GET /v2/health/live'"),
        ("GET /v2/{what}sharedmemory", "is not '/', words and placeholders"),
        ("GET toys", "is not '/', words and placeholders"),
        ("GET /toys//x", "is not '/', words and placeholders"),
        ("GET /toys?x", "is not '/', words and placeholders"),
        ("GET /toys[/x", "is not '/', words and placeholders"),
        ("GET /toys]/x[", "is not '/', words and placeholders"),
        ("GET /toys[/[x]]", "is not '/', words and placeholders"),
        ("GET /toys[x][?]", "is not '/', words and placeholders"),
        ("GET /{a}/{a}", "has a placeholder twice"),
        ("FETCH /toys", "is named 'FETCH /toys', not '<DELETE|GET"),
        ("/toys", "is named '/toys', not '<DELETE|GET"),
    ],
)
def test_a_route_that_is_none_or_cores_own_breaks_its_plugin(install: Install, name: str, reason: str) -> None:
    install("headrace-toy", "toy", ROUTE.format(name=name, category="metadata"))
    plugins = Plugins.discover(["toy"])
    assert reason in str(info(plugins, "toy").error)
    assert "headrace_toy" not in plugins.extensions.names()


def test_a_route_of_no_category_breaks_its_plugin(install: Install) -> None:
    install("headrace-toy", "toy", ROUTE.format(name="GET /toys", category="toys"))
    assert "'toys', which is none of health" in str(info(Plugins.discover(), "toy").error)


def test_a_route_without_an_operation_breaks_its_plugin(install: Install) -> None:
    route = ROUTE.format(name="GET /toys", category="inference")
    install("headrace-one", "one", route.replace('ExtensionOperation("toy", "inference")', '"toy"'))
    install("headrace-two", "two", route.replace("operation = ", "category ="))
    plugins = Plugins.discover(["one", "two"])
    assert "operation of route 'GET /toys' is 'toy', which is neither" in str(info(plugins, "one").error)
    assert "has a category" in str(info(plugins, "two").error)


@pytest.mark.parametrize("path", ["/v2/models/{name}/toys", "/v2/models/{name}/versions/{version}/toys", "/v1/x"])
def test_a_path_beside_those_of_core_is_free(install: Install, path: str) -> None:
    install("headrace-toy", "toy", ROUTE.format(name=f"POST {path}", category="inference"))
    assert info(Plugins.discover(), "toy").error is None


#: A class of each kind that is abstract, or lacks a required member: its base, its members, and the reason.
INCOMPLETE = {
    "backends": ("Backend", "", "backend 'toy' lacks the methods load"),
    "schedulers": ("Scheduler", "", "scheduler 'toy' lacks the methods "),
    "caches": ("ResponseCache", "", "cache 'toy' lacks the methods get, put"),
    "storages": ("Storage", "", "storage 'toy' lacks the methods "),
    "interceptors": ("Interceptor", "", "interceptor 'toy' lacks the methods admit"),
    "frontends": ("Frontend", "", "frontend 'toy' lacks the methods "),
    "commands": ("Command", "help = 'toys'", "command 'toy' lacks the methods "),
}


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_a_class_that_lacks_methods_breaks_its_plugin(install: Install, kind: str) -> None:
    base, members, reason = INCOMPLETE[kind]
    source = f"from headrace import {base}, hookimpl\n\nclass Toy({base}):\n    name = 'toy'\n    {members}\n"
    install("headrace-toy", "toy", f"{source}\n@hookimpl\ndef register_{kind}():\n    return [Toy]\n")
    assert reason in str(info(Plugins.discover(["toy"]), "toy").error)


#: Members that do not match those of the base: the kind, the base, the members, and the reason.
UNFIT = [
    ("backends", "Backend", "devices = 'cpu'", "backend 'toy': 'devices' is 'cpu', expected a tuple"),
    (
        "backends",
        "Backend",
        "class Parameters: ...",
        "'Parameters' must be a dataclass in which every field has a default",
    ),
    (
        "schedulers",
        "Scheduler",
        "def finished(self, tickets): ...",
        "'finished' takes (self, tickets), expected (self, ",
    ),
    (
        "agents",
        "RepositoryAgent",
        "def __init__(self): ...",
        "agent 'toy': '__init__' takes (self), expected (self, model",
    ),
    ("frontends", "Frontend", "def enabled(self): ...", "frontend 'toy': 'enabled' is a method, expected a property"),
    ("frontends", "Frontend", "def stop(self): ...", "frontend 'toy': 'stop' must be an async method"),
]


@pytest.mark.parametrize(("kind", "base", "member", "reason"), UNFIT)
def test_a_member_that_cannot_stand_in_for_the_bases_breaks_its_plugin(
    install: Install, kind: str, base: str, member: str, reason: str
) -> None:
    body = f"    name = 'toy'\n    {member}\n"
    source = (
        f"from headrace import {base}, hookimpl\n\nclass Toy({base}):\n{body}\nToy.__abstractmethods__ = frozenset()\n"
    )
    install("headrace-toy", "toy", f"{source}\n@hookimpl\ndef register_{kind}():\n    return [Toy]\n")
    assert reason in str(info(Plugins.discover(["toy"]), "toy").error)


def test_a_hook_that_returns_a_class_instead_of_a_list_is_reported(install: Install) -> None:
    install("headrace-toy", "toy", BACKEND.format(name="toy").replace("[Toy]", "Toy"))
    error = str(info(Plugins.discover(["toy"]), "toy").error)
    assert "register_backends returned <class 'headrace_toy.Toy'>, expected a list of classes" in error


def test_a_route_without_a_name_or_async_breaks_its_plugin(install: Install) -> None:
    route = ROUTE.format(name="GET /toys", category="inference")
    install("headrace-one", "one", route.replace('name = "GET /toys"', ""))
    install("headrace-two", "two", route.replace("async def answer", "def answer"))
    plugins = Plugins.discover(["one", "two"])
    assert "which has no name, but None" in str(info(plugins, "one").error)
    assert "'answer' of route 'GET /toys' is not async" in str(info(plugins, "two").error)


def test_of_two_distributions_with_one_name_the_first_on_the_path_counts(install: Install, tmp_path: Path) -> None:
    """As `importlib.metadata` has it, however the name is spelled, and also if the first is no plugin."""
    install("headrace-toy", "toy", BACKEND.format(name="toy"))
    later = tmp_path / "later" / "Headrace_Toy-0.9.dist-info"
    later.mkdir(parents=True)
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: Headrace_Toy\nVersion: 0.9\n\nVersion: none\n")
    (later / "entry_points.txt").write_text("[headrace]\nolder = headrace_toy\n")
    sys.path.append(str(later.parent))
    try:
        assert info(Plugins.discover(), "toy").version == "1.2"
        assert "older" not in [plugin.name for plugin in Plugins.discover().plugins]
        (tmp_path / "headrace_toy-1.2.dist-info" / "entry_points.txt").unlink()
        assert {"toy", "older"}.isdisjoint(plugin.name for plugin in Plugins.discover().plugins)
        shutil.rmtree(tmp_path / "headrace_toy-1.2.dist-info")
        importlib.invalidate_caches()
        assert info(Plugins.discover(), "older").version == "0.9"
    finally:
        sys.path.remove(str(later.parent))
