"""Modules that import each other in a circle: none do when they are imported, and the number of others must not grow.

What counts as importing is every import, also under ``if TYPE_CHECKING:`` and in functions: who reads one module of a
circle has to read them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.architecture.test_imports import Import, imports

ROOT = Path(__file__).parents[2]
#: The number of modules in import circles. A change that removes some lowers it.
IN_CIRCLES = 15


def modules() -> dict[str, Path]:
    """Every module of the distributions by its name, but those that are generated and the templates."""
    found = {}
    for folder in [ROOT / "core/src", ROOT / "testing/src", *sorted(ROOT.glob("*/*/src"))]:
        if folder.parent.name != "_template":
            for path in sorted(folder.rglob("*.py")):
                words = path.relative_to(folder).with_suffix("").parts
                if not path.name.endswith("_pb2.py"):
                    found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found


def imported(name: str, found: Iterable[Import], known: Iterable[str]) -> set[str]:
    """The modules among ``known`` that ``found``, the imports of the module ``name``, are of."""
    ours = [each.module for each in found if not each.module.endswith("_pb2")]  # as of any module of a package
    wanted = {module if module in known else module.rpartition(".")[0] for module in ours}
    return (wanted & set(known)) - {name}


def in_circles(graph: Mapping[str, set[str]]) -> set[str]:
    """The modules from which a way leads back to themselves."""
    return {name for name in graph if name in _reached(graph, name)}


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += graph[name]
    return reached


@pytest.fixture(scope="module")
def sources() -> dict[str, Sequence[Import]]:
    return {name: imports(path.read_text(encoding="utf-8")) for name, path in modules().items()}


def test_no_modules_import_each_other_when_they_are_imported(sources: dict[str, Sequence[Import]]) -> None:
    assert len(sources) > 200
    graph = {
        name: imported(name, [each for each in found if not each.typing_only and not each.in_function], sources)
        for name, found in sources.items()
    }
    assert in_circles(graph) == set()


def test_no_further_modules_are_in_circles(sources: dict[str, Sequence[Import]]) -> None:
    graph = {name: imported(name, found, sources) for name, found in sources.items()}
    found = in_circles(graph)
    assert len(found) <= IN_CIRCLES, sorted(found)


def test_a_circle_is_found_and_what_leads_to_one_is_none() -> None:
    known = ["p.a", "p.b", "p.c"]
    texts = {"p.a": "from p import b", "p.b": "def f():\n    from p.c import X", "p.c": "import p.b"}
    graph = {name: imported(name, imports(text), known) for name, text in texts.items()}
    assert graph == {"p.a": {"p.b"}, "p.b": {"p.c"}, "p.c": {"p.b"}}
    assert in_circles(graph) == {"p.b", "p.c"}
