"""Imports point down the path of a request, and engines are imported only where they are needed.

The path is headrace_http or headrace_grpc -> frontends -> engine -> models -> schedulers -> executors -> backends.base.
Everything may import ``messages``, which travel along it and import nothing of the path.

That holds for imports under ``if TYPE_CHECKING:``, too: a frontend is handed the engine, which is all that it
sees of the inside, and never names a server.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import headrace
import headrace_engines
import headrace_llm
import headrace_testing
from headrace.distributions import EXTRAS

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core/src"
KITS = ROOT / "testing/src"
#: What plugins of several kinds share: libraries that obey the rules of plugins, and that plugins may import.
CONTRACTS = sorted(path for path in ROOT.glob("contracts/*/src/*") if path.is_dir())
BACKENDS = sorted(path.parent for path in ROOT.glob("backends/*/pyproject.toml"))
#: Every first-party plugin, the templates included: a stranger could have written it.
PLUGINS = sorted(
    path.parent
    for kind in (
        *("backends", "schedulers", "frontends", "caches", "storages", "agents"),
        *("interceptors", "commands", "extensions"),
    )
    for path in ROOT.glob(f"{kind}/*/pyproject.toml")
)

LEAVES = {"errors", "distributions", "messages", "config", "telemetry"}
#: What each package may import at run time, beside itself.
MAY_IMPORT = {
    "errors": set[str](),
    "distributions": {"errors"},
    "command": set[str](),
    "messages": {"errors", "config"},
    "config": {"errors", "distributions", "messages"},
    "telemetry": {"errors", "messages", "config"},
    "ipc": {"errors", "messages", "headrace_engines"},
    "supervision": {"errors", "ipc"},
    "backends": LEAVES,
    "caches": LEAVES | {"backends", "off_loop"},
    "executors": LEAVES | {"backends"},
    "headrace_processes": LEAVES | {"__init__", "backends", "executors", "headrace_engines", "ipc", "supervision"},
    "schedulers": LEAVES | {"executors", "backends", "caches"},
    "storage": LEAVES,
    "agents": LEAVES | {"storage"},
    "models": LEAVES | {"schedulers", "executors", "backends", "caches", "storage", "agents"},
    "off_loop": {"errors", "memory_release"},
    "memory_release": set[str](),
    "engine": LEAVES | {"models", "off_loop"},
    "frontends": LEAVES | {"engine", "off_loop", "memory_release"},
    "headrace_locations": LEAVES | {"engine", "frontends", "off_loop"},
    "headrace_hosts": LEAVES | {"engine", "frontends", "off_loop"},
    "headrace_http": LEAVES | {"__init__", "engine", "frontends", "headrace_hosts", "headrace_locations", "off_loop"},
    "headrace_engines": {"__init__"},
    "headrace_loading": LEAVES | {"models", "storage"},
    "headrace_grpc": LEAVES
    | {"__init__", "engine", "frontends", "headrace_hosts", "headrace_locations", "off_loop", "memory_release"},
}
#: The frontends of core's own distribution, packages beside `headrace` which import neither it whole nor one another.
BESIDE = {"headrace_http", "headrace_grpc"}
#: The command line. Core proper imports nothing of it.
COMMAND_LINE = "headrace_cli"
#: Instances in processes of their own, with `ipc` and `supervision`, which know neither instances nor models.
PROCESSES = "headrace_processes"
#: For authors of backends, in core's own distribution; core proper imports nothing of it.
FOR_ENGINES = "headrace_engines"
#: An instance or a scheduler without a server, for the conformance kits. Core proper imports nothing of it.
HARNESSES = "headrace_harnesses"
#: What the hosts of HTTP and gRPC share. Core proper imports nothing of it.
HOSTS = "headrace_hosts"
#: Tensors outside of their messages. Core proper imports nothing of it.
LOCATIONS = "headrace_locations"
#: Loads and unloads, for the control modes of plugins. Core proper imports nothing of it.
LOADING = "headrace_loading"
#: The packages beside core proper, in the same distribution.
AROUND = {*BESIDE, COMMAND_LINE, FOR_ENGINES, HARNESSES, HOSTS, LOADING, LOCATIONS, PROCESSES}
#: What frontends, the first-party ones and a stranger's, see of the inside. `headrace.engine` is the way to it.
SEEN_BY_FRONTENDS = {
    "headrace.config": {"config_json", "model_config_pb2", "option_groups", "option_parts", "options", "support"},
    "headrace.telemetry": {"exposition", "machine", "log_limits", "published"},
}
#: Modules that put the parts together, in a server or in a test of one part. They may import anything.
COMPOSITION = {
    "__init__",
    "__main__",
    "builtins",
    "headrace_cli",
    "headrace_harnesses",
    "hookspecs",
    "plugins",
    "registry",
    "server",
}
ENGINES = {"onnx", "onnxruntime", "openvino", "sklearn", "tensorflow", "tensorrt", "torch"}


@dataclass(frozen=True, slots=True)
class Import:
    """One name imported: ``headrace.messages.tensor``. ``typing_only`` if under TYPE_CHECKING."""

    module: str
    line: int
    typing_only: bool
    in_function: bool

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def part(self) -> str:
        """The part of headrace it lies in: ``messages``; ``__init__`` for names of headrace itself."""
        words = self.module.split(".")
        if self.top == PROCESSES and len(words) > 1 and words[1] in MAY_IMPORT:
            return words[1]
        if self.top in AROUND:
            return self.top
        return words[1] if len(words) > 1 and words[1] in MAY_IMPORT.keys() | COMPOSITION else "__init__"


@cache
def imports(source: str) -> Sequence[Import]:
    """Every import of ``source``, with the place it stands in."""
    return tuple(_walk(ast.parse(source), typing_only=False, in_function=False))


def _walk(node: ast.AST, *, typing_only: bool, in_function: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, typing_only, in_function) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        yield from (Import(f"{base}.{alias.name}", node.lineno, typing_only, in_function) for alias in node.names)
    elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        for guarded in node.body:
            yield from _walk(guarded, typing_only=True, in_function=in_function)
        for other in node.orelse:
            yield from _walk(other, typing_only=typing_only, in_function=in_function)
    else:
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, typing_only=typing_only, in_function=inside)


def upward(part: str, source: str) -> list[str]:
    """The imports of a module of ``part`` that do not point down the path."""
    if part in COMPOSITION:
        return []
    wrong = []
    for found in imports(source):
        is_ours = found.top in {"headrace", *AROUND}
        if not is_ours or found.part == part or found.part in MAY_IMPORT[part]:
            continue
        wrong.append(f"line {found.line}: {part} imports {found.module}")
    return wrong


def unseen(source: str) -> list[str]:
    """The imports of a frontend that reach beside the engine."""
    wrong = []
    for found in imports(source):
        package, _, rest = found.module.removeprefix("headrace.").partition(".")
        seen = SEEN_BY_FRONTENDS.get(f"headrace.{package}")
        if found.top == "headrace" and seen is not None and rest.split(".")[0] not in seen:
            wrong.append(f"line {found.line}: a frontend imports {found.module}")
    return wrong


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not path.name.endswith("_pb2.py"))


def engines_of(backend: Path) -> set[str]:
    """The import names of what a backend's distribution, or an extra of it, needs beside Headrace and NumPy."""
    project = (backend / "pyproject.toml").read_text()
    (needed,) = re.findall(r"^dependencies = \[(.*?)\]", project, re.DOTALL | re.MULTILINE)
    extras = re.findall(r"^\[project\.optional-dependencies\]$(.*?)^\[", project, re.DOTALL | re.MULTILINE)
    wanted = [needed, *re.findall(r"\[(.*?)\]", "".join(extras), re.DOTALL)]
    found = {name for block in wanted for name in re.findall(r'"(\w+)', block)} - {"headrace", "numpy"}
    return found | {"PIL"} if "pillow" in found else found  # the one whose modules have another name


def part_of(path: Path) -> str:
    package, inner, *_ = path.relative_to(CORE).parts
    if package == PROCESSES:
        return inner if inner in MAY_IMPORT else package
    return package if package in AROUND else inner.removesuffix(".py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", modules(CORE), ids=name_of)
def test_core_imports_point_down_the_path(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT.keys() | COMPOSITION, f"say in this test what {part} may import"
    assert upward(part, path.read_text()) == []


def beside(source: str) -> list[str]:
    """The imports of a module of core proper that reach the packages beside it."""
    return [f"line {each.line}: core proper imports {each.module}" for each in imports(source) if each.top in AROUND]


#: `headrace.__init__` names what the distribution exports. It imports a module when a name of it is first used.
PROPER = [path for path in modules(CORE / "headrace") if path != CORE / "headrace/__init__.py"]


@pytest.mark.parametrize("path", PROPER, ids=name_of)
def test_core_proper_imports_no_package_beside_it(path: Path) -> None:
    """Those packages are plugins, the command line and tools. The modules that compose a server obey the rule, too."""
    assert beside(path.read_text()) == []


@pytest.mark.parametrize("package", sorted(AROUND))
def test_an_import_of_a_package_beside_core_is_found(package: str) -> None:
    assert len(beside(f"if TYPE_CHECKING:\n    from {package}.server import Server")) == 1


def test_a_server_is_imported_without_the_packages_beside_core() -> None:
    program = "import sys, headrace.server; print(*(name for name in sys.modules if name.startswith('headrace_')))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []


def test_the_page_lists_what_the_processes_import_and_headrace_does_not_export() -> None:
    found = [each for path in modules(CORE / PROCESSES) for each in imports(path.read_text()) if each.top == "headrace"]
    missing = {each.module.rpartition(".")[2] for each in found} - {*headrace.__all__}
    page = (ROOT / "docs/architecture.md").read_text()
    (section,) = re.findall(r"^### Kinds of executor$(.*?)^### ", page, re.DOTALL | re.MULTILINE)
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*?\|(.*)\|$", section, re.MULTILINE)))
    assert sorted(missing) == sorted(listed)


#: What the HTTP and the gRPC frontend share with `headrace_grpc.http2`; it imports nothing of ours.
HELD_BYTES = "headrace_hosts.held_bytes."


@pytest.mark.parametrize(
    "path",
    [*modules(CORE / "headrace_grpc/http2"), CORE / "headrace_hosts/held_bytes.py"],
    ids=name_of,
)
def test_http2_knows_neither_grpc_nor_the_server(path: Path) -> None:
    allowed = {found.module for found in imports(path.read_text()) if found.top in sys.stdlib_module_names | {"hpack"}}
    ours = {found.module for found in imports(path.read_text())} - allowed
    known = ("headrace_grpc.http2.", HELD_BYTES)
    assert [module for module in sorted(ours) if not module.startswith(known)] == []


#: Modules of the extras of core, and who imports each before it is asked for.
EXTRA_MODULES = {
    "blake3": set[str](),
    "grpc": set(),
    "grpc_health": set[str](),
    "grpc_reflection": set[str](),
    "hypercorn": set(),
    "ml_dtypes": {"dtypes.py"},  # which does without where it is missing
    "re2": set[str](),
}


@pytest.mark.parametrize("module", EXTRA_MODULES)
def test_an_extra_is_imported_by_what_needs_it_and_nowhere_else(module: str) -> None:
    """A server with the native hosts does not import it."""
    early = {
        path.name
        for path in modules(CORE)
        for found in imports(path.read_text())
        if found.top == module and not (found.typing_only or found.in_function)
    }
    assert early == EXTRA_MODULES[module]


def test_core_requires_what_it_imports_and_its_extras_are_those_that_it_names() -> None:
    project = (ROOT / "core/pyproject.toml").read_text()
    required = re.findall(r"^dependencies = \[(.*?)^\]", project, re.DOTALL | re.MULTILINE)[0]
    distributions = {"prometheus-client": "prometheus_client", "protobuf": "google"}
    packages = {distributions.get(name, name) for name in re.findall(r'"([\w-]+)[>]', required)}
    always = {
        found.top
        for path in modules(CORE)
        for found in imports(path.read_text())
        if not found.typing_only and found.top not in sys.stdlib_module_names
    }
    ours = {"headrace", *AROUND}
    assert always - EXTRA_MODULES.keys() - ours - {"pynvml"} == packages
    for extra in EXTRAS.values():
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)


@pytest.mark.parametrize("path", modules(CORE), ids=name_of)
def test_core_imports_no_engine_anywhere(path: Path) -> None:
    assert [found.module for found in imports(path.read_text()) if found.top in ENGINES] == []


@pytest.mark.parametrize("backend", BACKENDS, ids=name_of)
def test_a_backend_imports_headrace_itself_and_its_engine_only_inside_functions(backend: Path) -> None:
    packages = {path.name for path in (backend / "src").iterdir() if path.is_dir()}
    contracts = {path.name for path in CONTRACTS}
    known = sys.stdlib_module_names | {"headrace", FOR_ENGINES, "numpy", "ml_dtypes", "google"} | packages | contracts
    engines = engines_of(backend)
    for path in modules(backend / "src"):
        allowed = known | engines | ({"pytest"} if path.name == "testing.py" else set())  # pytest's own entry point
        for found in imports(path.read_text()):
            assert found.top in allowed, f"{path}:{found.line} imports {found.module}"
            late = found.in_function or found.typing_only
            assert late or found.top not in engines, f"{path}:{found.line} imports {found.module} too early"


@pytest.mark.parametrize("path", modules(ROOT / "tests/core"), ids=name_of)
def test_the_tests_of_core_need_no_backend_distribution(path: Path) -> None:
    others = [found for found in imports(path.read_text()) if found.top.startswith("headrace_")]
    known = {*AROUND, "headrace_testing"}
    assert [found.module for found in others if found.top not in known] == []


@pytest.mark.parametrize("path", [path for folder in (CORE, KITS, *BACKENDS) for path in modules(folder)], ids=name_of)
def test_private_names_stay_in_their_module(path: Path) -> None:
    ours = [found for found in imports(path.read_text()) if found.top.startswith("headrace")]
    private = [found.module for found in ours if re.search(r"\._[a-z]", found.module)]
    assert private == []


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("executors", "from headrace.schedulers.base import Scheduler"),
        ("executors", "from headrace_processes.child import Child"),
        ("models", "from headrace_cli.flags import FLAGS"),
        ("models", "from headrace_processes.process_kind import ProcessExecutors"),
        ("supervision", "from headrace_processes.child import Child"),
        ("headrace_processes", "from headrace.models.served import ServedModel"),
        ("schedulers", "import headrace.models.served"),
        ("messages", "import headrace_http"),
        ("headrace_grpc", "from headrace_http.message import HttpReply"),
        ("headrace_http", "from headrace.models.served import ServedModel"),
        ("models", "def late():\n    from headrace.server import Server"),
        ("frontends", "from headrace.schedulers.in_flight import RequestQueue"),
        ("frontends", "from headrace.server import Server"),
        ("frontends", "from headrace.models.served import ServedModel"),
        ("frontends", "if TYPE_CHECKING:\n    from headrace.server import Server"),
        ("engine", "from headrace.frontends.base import Frontend"),
        ("models", "if TYPE_CHECKING:\n    from headrace.server import Server"),
        ("backends", "from headrace import Server"),
        ("ipc", "from headrace.executors.threads import LoopMailbox"),
        ("ipc", "from headrace.telemetry.series import MetricKind"),
        ("backends", "from headrace_processes.ipc.framing import Frame"),
    ],
)
def test_an_upward_import_is_found(part: str, source: str) -> None:
    assert len(upward(part, source)) == 1


FRONTENDS = [path for folder in ("headrace/frontends", *sorted(BESIDE)) for path in modules(CORE / folder)]


@pytest.mark.parametrize("path", FRONTENDS, ids=name_of)
def test_a_frontend_sees_the_engine_and_no_more_of_the_inside(path: Path) -> None:
    assert unseen(path.read_text()) == []


@pytest.mark.parametrize(
    "source", ["from headrace.telemetry.statistics import Snapshot", "from headrace.config import parse"]
)
def test_a_look_past_the_engine_is_found(source: str) -> None:
    assert len(unseen(source)) == 1


def private(source: str, kits: bool) -> list[str]:
    """Return the imports of a plugin or a kit that reach past what `headrace` exports.

    With ``kits`` it is a test of a plugin: it may also import what `headrace_testing` exports.
    """
    packages: list[ModuleType] = [headrace, headrace_engines, headrace_llm, *([headrace_testing] if kits else [])]
    public = {f"{package.__name__}.{name}" for package in packages for name in package.__all__}
    public |= {"headrace", "headrace_llm"}
    inside = ("headrace", COMMAND_LINE, FOR_ENGINES, HARNESSES, LOADING, PROCESSES)
    return [
        f"line {found.line}: a plugin imports {found.module}"
        for found in imports(source)
        if found.top in (*inside, "headrace_testing", "headrace_llm") and found.module not in public
    ]


def test_there_are_plugins_to_look_at() -> None:
    assert {"_template", "onnx", "python"} <= {plugin.name for plugin in PLUGINS}


@pytest.mark.parametrize("path", modules(CORE / FOR_ENGINES), ids=name_of)
def test_the_helpers_for_engines_import_only_what_headrace_exports_and_themselves(path: Path) -> None:
    assert private(path.read_text().replace(FOR_ENGINES, "themselves"), kits=False) == []


@pytest.mark.parametrize("path", [path for folder in CONTRACTS for path in modules(folder)], ids=name_of)
def test_a_contract_imports_only_what_headrace_exports_and_itself(path: Path) -> None:
    own = path.relative_to(ROOT).parts[3]
    assert private(path.read_text().replace(own, "itself"), kits=False) == []
    others = {found.top for found in imports(path.read_text()) if found.top.startswith("headrace")}
    assert others <= {"headrace", own}


@pytest.mark.parametrize("path", modules(KITS), ids=name_of)
def test_the_kits_import_only_what_headrace_exports_and_themselves(path: Path) -> None:
    assert private(path.read_text().replace("headrace_testing", "themselves"), kits=False) == []


def test_a_kit_registers_no_plugin_and_core_no_plugin_of_pytest() -> None:
    """A server loads no part of the kits, and pytest loads nothing where only `headrace` is installed."""
    groups = {
        name: re.findall(
            r"^\[project\.entry-points\.(\w+)\]", (ROOT / name / "pyproject.toml").read_text(), re.MULTILINE
        )
        for name in ("core", "testing")
    }
    assert groups == {"core": ["headrace"], "testing": ["pytest11"]}


@pytest.mark.parametrize("plugin", PLUGINS, ids=name_of)
def test_a_plugin_imports_only_what_headrace_exports(plugin: Path) -> None:
    found = {path: private(path.read_text(), "tests" in path.relative_to(plugin).parts) for path in modules(plugin)}
    assert {name_of(path): wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("source", "kits"),
    [
        ("from headrace.errors import LoadError", False),
        ("def late():\n    import headrace.server", False),
        ("from headrace import server", False),
        ("from headrace_processes.child import Child", False),
        ("if TYPE_CHECKING:\n    from headrace.backends.base import Model", False),
        ("from headrace_engines.graph import Graph", False),
        ("from headrace_testing import BackendConformance", False),
        ("from headrace_testing.serving import serve", True),
    ],
)
def test_an_import_past_the_vocabulary_is_found(source: str, kits: bool) -> None:
    assert len(private(source, kits)) == 1


def test_a_start_with_all_plugins_imports_what_serves_and_no_more() -> None:
    """What only commands and encrypted models need takes a tenth of the CPU of a start."""
    program = "import sys; from headrace.plugins import Plugins; Plugins.discover(); print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {*answer.stdout.split()} & {*ENGINES, "cryptography", "pyarrow", "yaml"} == set()


@pytest.mark.parametrize("module", ["headrace", "headrace_cli", "headrace.server", "headrace_onnx"])
def test_importing_the_module_imports_no_engine(module: str) -> None:
    program = f"import sys, {module}; print(*sorted(set(sys.modules) & set(sys.argv[1:])))"
    answer = subprocess.run([sys.executable, "-c", program, *ENGINES], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == []
