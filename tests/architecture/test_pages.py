"""Pages that show code show code that exists and runs."""

from __future__ import annotations

import ast
import asyncio
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from headrace import Server, hookimpl
from headrace.config.option_groups import group_flags
from headrace.config.support import SUPPORT, FlagState, flag

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for path in (ROOT / "core/src").rglob("*.py") if not path.name.endswith("_pb2.py"))
PACKAGED = ("headrace", "headrace_cli", "headrace_processes")
FOLDERS = (ROOT, ROOT / "core/src", *(ROOT / "core/src" / package for package in PACKAGED))
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every name that the module defines, assigns, imports or takes as an argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")


@functools.cache
def known() -> set[str]:
    """Return every name that core's modules use."""
    return {name for path in SOURCES for name in names_in(ast.parse(path.read_text()))}


CODE = sorted(
    {
        code
        for code in re.findall(r"`([^`\n]+)`", (ROOT / "docs/architecture.md").read_text())
        if re.fullmatch(r"[A-Za-z_][\w.]*", code) and not code.endswith((".py", ".pbtxt"))
    }
)
PATHS = sorted(set(re.findall(r"`([\w/]+(?:/|\.py))`", (ROOT / "docs/architecture.md").read_text())))


def test_the_architecture_page_names_code_and_files() -> None:
    assert len(CODE) > 40
    assert len(PATHS) > 10


#: The import packages that are named as such.
PACKAGES = {
    "headrace",
    *(
        f"headrace_{name}"
        for name in "cli engines grpc harnesses hosts http llm loading locations processes".split()  # noqa: SIM905
    ),
    "tritonclient",
}


@pytest.mark.parametrize("code", CODE)
def test_what_the_architecture_page_names_exists(code: str) -> None:
    assert [part for part in code.split(".") if part not in known() | PACKAGES] == []


@pytest.mark.parametrize("path", PATHS)
def test_where_the_architecture_page_points_is_something(path: str) -> None:
    assert any((folder / path).exists() for folder in FOLDERS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_heading_finds_it(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]+)#([^)]+)\)", page.read_text()):
        headings = re.findall(r"^#+ (.*)$", (page.parent / target).read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


def test_the_index_links_every_page() -> None:
    linked = set(re.findall(r"\]\((\S+\.md)\)", (ROOT / "docs/index.md").read_text()))
    assert {page.name for page in ROOT.glob("docs/*.md")} <= linked | {"index.md"}


def needs_in(project: Path) -> dict[str, list[str]]:
    """Return what ``dependencies`` and each extra of a pyproject.toml need, without versions."""
    lists = re.findall(r'^([\w-]+) = \[((?:\s*"[^"]*",?)*)\s*\]', project.read_text(), re.MULTILINE)
    return {name: re.findall(r'"([\w-]+(?:\[[\w,-]+\])?)[^"]*"', needs) for name, needs in lists}


def test_the_command_for_all_extras_has_the_folder_of_each() -> None:
    """None is on a package index, so pip must get each from the clone."""
    projects = {re.findall('name = "(.*)"', path.read_text())[0]: path for path in ROOT.glob("*/*/pyproject.toml")}
    (command,) = [block for block in blocks("docs/getting-started.md", "sh") if "[all]" in block]
    words = subprocess.run(["bash", "-c", f"echo {command}"], capture_output=True, text=True, check=True).stdout.split()
    extras, wanted = needs_in(ROOT / "core/pyproject.toml"), ["headrace[all]"]
    for each in wanted:  # it grows
        name, *of = re.split(r"[\[,\]]", each)
        needed = [need for extra in of for need in extras.get(extra, ())]
        needed += needs_in(projects[name])["dependencies"] if name in projects else ()
        wanted += [need for need in needed if need not in wanted]
    folders = {
        f"./{projects[name].parent.relative_to(ROOT)}" for each in wanted if (name := each.split("[")[0]) in projects
    }
    assert len(folders) > 30
    assert sorted(folders - set(words)) == []


def test_users_of_triton_are_told_every_refusal_in_its_words() -> None:
    page = (ROOT / "docs/from-triton.md").read_text()
    refusals = [f"`{flag(name)} is refused: {support.reason}`" for name, support in SUPPORT.items()
                if support.state is FlagState.REFUSED]  # fmt: skip
    assert refusals
    assert [text for text in refusals if text not in page] == []
    assert page.count(" is refused: ") == len(refusals)


@pytest.mark.parametrize(
    ("page", "template", "package", "name"),
    [
        ("docs/write-a-backend.md", "backends/_template", "headrace_template", "acme"),
        ("docs/write-a-scheduler.md", "schedulers/_template", "headrace_template_scheduler", "shortest"),
        ("docs/write-a-frontend.md", "frontends/_template", "headrace_template_frontend", "lines"),
        ("docs/write-a-cache.md", "caches/_template", "headrace_template_cache", "shelf"),
        ("docs/write-a-storage.md", "storages/_template", "headrace_template_storage", "zipped"),
        ("docs/write-an-extension.md", "extensions/_template", "headrace_template_extension", "plain"),
        ("docs/write-a-repository-agent.md", "agents/_template", "headrace_template_agent", "packed"),
        ("docs/write-an-interceptor.md", "interceptors/_template", "headrace_template_interceptor", "keys"),
        ("docs/write-a-command.md", "commands/_template", "headrace_template_command", "needs"),
    ],
)
def test_a_page_on_plugins_shows_what_is_written_from_the_template(
    page: str, template: str, package: str, name: str
) -> None:
    files = (f"src/{package}/__init__.py", "pyproject.toml", "tests/test_template.py")
    texts = [(ROOT / template / file).read_text() for file in files]
    module, test = blocks(page, "python")
    (project,) = blocks(page, "toml")
    written = [text.replace("template", name).replace("Template", name.capitalize()) for text in texts]
    assert [module, project, test] == written


def test_the_page_on_extensions_shows_the_plugin_of_events() -> None:
    (shown,) = [block for block in blocks("docs/write-an-extension.md", "py") if "class Events" in block]
    source = (ROOT / "frontends/events/src/headrace_events/__init__.py").read_text()
    assert (shown, source.count("\n") <= 60) == (source, True)


SCRIPTS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in ("docs/getting-started.md", "docs/python.md")
    for number, block in enumerate(blocks(page, "python"), 1)
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_in_the_docs_runs(script: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=ROOT, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
    for shown in re.findall(r"print\(.*\)  # (.*)", script):
        assert shown in done.stdout


def test_the_observer_and_the_hook_of_the_pages_are_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("docs/parts.md", "python")
    plugin = ModuleType("watcher")
    exec(compile(block, "docs/parts.md", "exec"), vars(plugin))
    hook, options = blocks("docs/plugins.md", "python")
    exec(compile(hook, "docs/plugins.md", "exec"), vars(plugin))
    exec(compile(options, "docs/plugins.md", "exec", dont_inherit=True), vars(plugin))
    (tmp_path / "m" / "1").mkdir(parents=True)
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }'
    (tmp_path / "m" / "config.pbtxt").write_text(f'backend: "identity" max_batch_size: 8 {tensors}')
    observers: list[Any] = []
    observe = plugin.observe_model

    def watched(model: Any) -> Any:
        observers.append(observe(model))
        return observers[-1]

    vars(plugin)["observe_model"] = hookimpl(watched)

    async def scenario() -> None:
        server = Server(tmp_path)
        server.plugins.register(plugin)
        await server.start()
        await server.infer_async("m", {"x": np.ones((3, 1), np.float32)})
        await server.stop()

    asyncio.run(scenario())
    assert [observer.rows for observer in observers] == [3]
    assert "m version 1 takes requests" in capsys.readouterr().out
    assert [flag.text for flag in group_flags(plugin.WaterOptions)] == ["--water-colour"]
