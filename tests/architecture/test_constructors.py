"""A constructor that takes more than eight things does more than one: what belongs together is one thing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "core/src"
SOURCES = sorted(path for path in ROOT.rglob("*.py") if not path.name.endswith("_pb2.py"))
MOST = 8

#: Records of which more fields must be given, and why they are not parted.
LONG_RECORDS = {
    "FinishedInference": "the fields of a plain tuple, which core makes where each inference ends",
    "InstanceSpec": "the message that a child is started with: each field is an item of it",
    "ModelView": "what a frontend may know of a model, made once per load by one function",
    "SchedulerContext": "what a scheduler may use, made by the model queue alone; authors only read it",
    "Snapshot": "the figures of one moment, each summed by its name",
    "_Layout": "what is remembered of a gRPC message, read at fixed places on the path of a request",
}


def classes(source: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))


def constructors(source: str) -> dict[str, int]:
    """The parameters of each constructor that is written out, by its class."""
    found = {}
    for node in classes(source):
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                found[node.name] = len(each.args.args) - 1 + len(each.args.kwonlyargs)
    return found


def records(source: str) -> dict[str, tuple[int, int]]:
    """The fields of each record, a dataclass or a named tuple, by its class: all, and those without a default."""
    found = {}
    for node in classes(source):
        kinds = " ".join(map(ast.unparse, [*node.decorator_list, *node.bases]))
        if "dataclass" in kinds or "NamedTuple" in kinds:
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            fields = [each for each in fields if "ClassVar" not in ast.unparse(each.annotation)]
            found[node.name] = len(fields), sum(each.value is None for each in fields)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_constructors_take_at_most_eight_parameters(path: Path) -> None:
    assert {name: count for name, count in constructors(path.read_text()).items() if count > MOST} == {}


def test_of_records_at_most_eight_fields_must_be_given() -> None:
    """The others have defaults and are given by name, such as limits and the optional parts of a request."""
    found = {name: count for path in SOURCES for name, (_, count) in records(path.read_text()).items() if count > MOST}
    assert found.keys() == LONG_RECORDS.keys()


def test_the_options_of_one_reader_are_at_most_eight() -> None:
    """A class of options has few fields with defaults, too: a part that takes it shows what it reads."""
    parts, whole = (records((ROOT / f"headrace/config/{name}.py").read_text()) for name in ("option_parts", "options"))
    found = {name: count for name, (count, _) in (parts | whole).items() if name.endswith("Options")}
    assert len(found) > 10
    assert {name: count for name, count in found.items() if count > MOST} == {}


def test_a_ninth_parameter_is_found() -> None:
    assert constructors("class A:\n    def __init__(self, a, b, c, d, e, f, g, h, *, i): ...") == {"A": 9}


def test_the_fields_of_a_record_are_counted() -> None:
    source = "@dataclass\nclass A:\n    a: ClassVar[int]\n    b: int\n    c: int = 1\n    d: str\nclass B:\n    e: int"
    assert records(source) == {"A": (3, 2)}
    assert records("class A(NamedTuple):\n    a: int") == {"A": (1, 1)}
