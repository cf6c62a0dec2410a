"""Writes models, runs ``headrace check``, and reads its reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_cli import main


def write(repository: Path, name: str, config: str) -> Path:
    (repository / name / "1").mkdir(parents=True)
    path = repository / name / "config.pbtxt"
    path.write_text(config)
    return path


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(["check", "--json", *words])
    return code, {found["model"]: found for found in json.loads(capsys.readouterr().out)}


def placed(found: dict[str, Any]) -> list[tuple[int, int, str, str]]:
    return [(one["line"], one["column"], one["field"], one["message"]) for one in found["problems"]]


def checked(headrace: Callable[..., Any], *words: str) -> tuple[int, dict[str, Any], str]:
    """The exit code, the reports and stderr of a process."""
    process = headrace("check", "--json", *words)
    code, stderr = process.finish()
    return code, {found["model"]: found for found in json.loads(process.popen.stdout.read())}, stderr


CONFIG = """
backend: "identity"
input { name: "a" data_type: TYPE_BOOL dims: 1 }
output { name: "b" data_type: TYPE_BOOL dims: 1 }
"""


#: A backend that prints, and refuses models with the prefix "broken".
BACKEND = """
import os
from headrace import Backend, Instance, LoadError, hookimpl

class Echo(Instance):
    def execute(self, inputs):
        if (inputs["a"] > 0.5).all():
            raise ValueError("too much")
        return {"b": inputs["a"]}

class Picky(Backend):
    name = "picky"
    def load(self, model):
        print("printed by", model.name)
        os.write(1, b"written to stdout")
        if model.name.startswith("broken"):
            raise LoadError(f"ValueError: boom\\n\\nAt:\\n  1/model.py(3): initialize\\n")
        return Echo()

@hookimpl
def register_backends():
    return [Picky]
"""


PICKY = CONFIG.replace("identity", "picky").replace("TYPE_BOOL", "TYPE_FP32")
