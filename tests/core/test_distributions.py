"""A backend that is not installed: the distribution that brings it is named, and not another backend."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from headrace.distributions import distribution_of
from headrace.errors import Code, LoadError
from headrace.plugins import Plugins

ROOT = Path(__file__).parents[2]
#: The kind of part, by the base class of what a distribution registers.
KINDS = {"Command": "command", "ControlMode": "control mode", "OptionGroup": "flag", "RepositoryAgent": "agent"}

#: The text of Triton 2.51.
TRITON = "unable to find backend library for backend '{}', try specifying runtime on the model configuration."


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (
            "fil",
            " Its distribution, headrace-fil, is not published yet; no plugin provides backend 'fil'; ",
        ),
        (
            "onnxruntime",
            " It comes with the distribution headrace-onnx: pip install headrace-onnx; no plugin provides ",
        ),
        ("python", " It comes with the distribution headrace-python: pip install headrace-python; no plugin provides "),
        ("nobody", " no plugin provides backend 'nobody'; installed: identity"),
        ("identitty", " no plugin provides backend 'identitty'; did you mean 'identity'? installed: identity"),
        ("Identity", " no plugin provides backend 'Identity'; did you mean 'identity'? installed: identity"),
        ("onnx", " no plugin provides backend 'onnx'; did you mean 'onnxruntime'? installed: identity"),
        ("torch", " no plugin provides backend 'torch'; did you mean 'pytorch'? installed: identity"),
        ("tf", " no plugin provides backend 'tf'; did you mean 'tensorflow'? installed: identity"),
        ("tensorrt_plan", " no plugin provides backend 'tensorrt_plan'; did you mean 'tensorrt'? installed: identity"),
    ],
)
def test_a_missing_backend_is_reported_as_by_triton_with_the_command_that_installs_it(name: str, hint: str) -> None:
    with pytest.raises(LoadError) as refusal:
        Plugins.discover(()).backends.get(name)
    assert refusal.value.message.startswith(TRITON.format(name) + hint)
    assert ("did you mean" in refusal.value.message) == ("did you mean" in hint)
    assert refusal.value.code is Code.INVALID_ARGUMENT


def registered() -> dict[tuple[str, str], str]:
    """Return the folder of each command, control mode, group of flags and agent in the tree, by kind and name."""
    found = {}
    for path in ROOT.glob("*/*/src/*/*.py"):
        if path.parts[-4] != "_template":
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                kinds = [KINDS[base.id] for base in getattr(node, "bases", ()) if getattr(base, "id", "") in KINDS]
                for line in node.body if kinds and isinstance(node, ast.ClassDef) else ():
                    target = getattr(line, "target", None) or next(iter(getattr(line, "targets", ())), None)
                    value = getattr(line, "value", None)
                    if getattr(target, "id", "") == "name" and isinstance(value, ast.Constant):
                        found[kinds[0], str(value.value)] = path.parts[-4]
    return found


def test_parts_of_a_distribution_are_found_by_name() -> None:
    folders = registered()
    assert len(folders) > 20
    assert {part: distribution_of(*part) for part in folders} == {
        part: f"headrace-{folder.replace('_', '-')}" for part, folder in folders.items()
    }
