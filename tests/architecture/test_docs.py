"""Documentation that matches the code: hooks, commands and files that it names."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*/README.md")])


def hook_signatures() -> list[str]:
    """Every hook as ``name(arguments) -> result``, in the order of hookspecs.py."""
    tree = ast.parse((ROOT / "core/src/headrace/hookspecs.py").read_text())
    hooks = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f"{hook.name}({ast.unparse(hook.args)}) -> {ast.unparse(hook.returns)}" for hook in hooks if hook.returns]


def commands(page: str) -> list[str]:
    """The lines of the page's shell blocks."""
    blocks: list[str] = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_docs_list_every_hook_with_its_signature_in_order() -> None:
    headings = re.findall(r"^### `(.*)`$", (ROOT / "docs/plugins.md").read_text(), re.MULTILINE)
    assert headings
    assert headings == hook_signatures()


#: What docs/parts.md lists, and where it is defined.
PARTS = {
    "Scheduler": "headrace/schedulers/base.py",
    "FullScheduler": "headrace/schedulers/base.py",
    "SchedulerContext": "headrace/schedulers/base.py",
    "InstanceInfo": "headrace/schedulers/base.py",
    "Wait": "headrace/schedulers/base.py",
    "Waiting": "headrace/schedulers/base.py",
    "Clock": "headrace/schedulers/base.py",
    "ExecutorKind": "headrace/executors/kind.py",
    "ControlMode": "headrace/models/control_mode.py",
    "Frontend": "headrace/frontends/base.py",
    "ResponseCache": "headrace/caches/base.py",
    "Storage": "headrace/storage/base.py",
    "RepositoryAgent": "headrace/agents/base.py",
    "Extension": "headrace/frontends/extension.py",
    "TensorLocation": "headrace_locations/tensor_locations.py",
    "GrpcMethod": "headrace_grpc/plugin_methods.py",
    "HttpRoute": "headrace_http/plugin_routes.py",
    "HttpPort": "headrace_http/http_host.py",
    "HttpCall": "headrace_http/plugin_routes.py",
    "WebSocketRoute": "headrace_http/web_sockets.py",
    "WebSocket": "headrace_http/web_sockets.py",
    "Command": "headrace/command.py",
    "Observer": "headrace/telemetry/executions.py",
    "BatchTimes": "headrace/telemetry/executions.py",
    "ModelView": "headrace/models/view.py",
    "Interceptor": "headrace/models/interceptors.py",
    "Watch": "headrace/messages/caller.py",
    "Caller": "headrace/messages/caller.py",
    "ServedModel": "headrace/models/served.py",
    "OtherModel": "headrace/schedulers/base.py",
}
#: Not for authors: set up by the base class, and described in the text.
DESCRIBED = {"name", "labels"}
#: What the frontends and the registry call of an addition.
CALLED_BY_CORE = {"kind", "check", "clashes_with", "handler", "rpc"}
#: What the registry calls of a frontend.
CALLED_BY_CORE_OF_FRONTENDS = {"check"}
#: What only the server calls of a served model.
CALLED_BY_SERVER = set("can_replace_instances replace_instances keep release drain close abandon join".split())  # noqa: SIM905
#: What a host calls of a socket.
CALLED_BY_HOSTS = {"is_accepted", "ending", "begin", "end", "end_by_stop", "read", "finish"}


def members(part: str) -> list[str]:
    """Return the public methods, properties and fields of the class in order, as ``name(arguments)`` or ``name``."""
    tree = ast.parse((ROOT / "core/src" / PARTS[part]).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == part]
    shown = []
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            shown.append(node.target.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            if "property" in map(ast.unparse, node.decorator_list):
                shown.append(node.name)
            else:
                given = (
                    node.args.args if "staticmethod" in map(ast.unparse, node.decorator_list) else node.args.args[1:]
                )
                rest = [f"*{node.args.vararg.arg}"] if node.args.vararg else []
                rest += [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
                names = [each.arg for each in (*given, *node.args.kwonlyargs)]
                shown.append(f"{node.name}({', '.join([*names, *rest])})")
    hidden = DESCRIBED | (CALLED_BY_CORE if {"Addition", "HttpRoute"} & {*map(ast.unparse, found.bases)} else set())
    hidden |= CALLED_BY_CORE_OF_FRONTENDS if part in ("Frontend", "HttpPort") else set()
    hidden |= CALLED_BY_HOSTS if part == "WebSocket" else set()
    hidden |= CALLED_BY_SERVER if part == "ServedModel" else set()
    return [text for text in shown if not text.startswith("_") and re.split(r"\W", text)[0] not in hidden]


@pytest.mark.parametrize("part", PARTS)
def test_docs_list_every_member_of_a_part_with_its_arguments_in_order(part: str) -> None:
    page = (ROOT / "docs/parts.md").read_text()
    (section,) = re.findall(rf"^## {part}$(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)
    assert members(part)
    assert rows == members(part)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_that_the_docs_list_is_exported(part: str) -> None:
    import headrace

    assert part in headrace.__all__
    assert part in dir(headrace)


def test_every_exported_name_is_in_the_docs() -> None:
    import headrace

    pages = " ".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    code = re.findall(r"```.*?```|`[^`]+`", pages, re.DOTALL)
    named = {word for each in code for word in re.findall(r"\w+", each)}
    assert [name for name in headrace.__all__ if name not in named] == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    ci = (ROOT / ".ci/run").read_text()
    *preparation, nox = commands("README.md")[-1].split(" && ")
    assert " && ".join(preparation) in ci
    named = [name for line in re.findall(rf"^ *{nox} -s ([a-z ]+)", ci, re.MULTILINE) for name in line.split()]
    assert sorted(named) == sorted(default_sessions())


def default_sessions() -> set[str]:
    """Return the sessions that plain nox runs, and those that these require."""
    found = set()
    for function in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(function, ast.FunctionDef):
            decorators = " ".join(map(ast.unparse, function.decorator_list))
            if "nox.session" in decorators and "default=False" not in decorators:
                found |= {function.name, *re.findall(r"requires=\['(\w+)'\]", decorators)}
    return found


def test_readme_serves_with_one_command() -> None:
    serve = commands("README.md")[0]
    assert re.fullmatch(
        r"\.ci/venv && .* \./core \./backends/onnx && \.venv/bin/headrace serve --model-repository=\S+", serve
    )


def test_the_lint_passes_beside_the_repository_that_the_readme_makes(tmp_path: Path) -> None:
    """Its folder ``models`` has the name of a module in benchmarks/."""
    copied = shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    model = tmp_path / "models/double/1/model.py"
    model.parent.mkdir(parents=True)
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
               if "TritonPythonModel" in block)  # fmt: skip
    model.write_text(code)
    ruff = Path(sys.executable).with_name("ruff")
    found = subprocess.run([ruff, "check", "."], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    assert any(copied.glob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_the_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_example_that_the_page_names_exists(page: Path) -> None:
    paths = re.findall(r"\bexamples/[\w./-]*\w", page.read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_contributing_names_every_session() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sessions = set(re.findall(r"^[*-] (\w+)", listed.stdout, re.MULTILINE))
    named = re.findall(r"`nox -s \"?(\w+)", (ROOT / "CONTRIBUTING.md").read_text())
    assert set(named) == sessions


@pytest.mark.parametrize("folder", ["core", "testing", "backends/onnx"])
def test_each_distribution_carries_the_licence_as_a_file(folder: str) -> None:
    """A link would leave the source distribution pointing outside itself."""
    licence = ROOT / folder / "LICENSE"
    assert not licence.is_symlink()
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()
