"""The recognition of files without `auto_complete_config`. The oracle is the imported class."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from headrace_python.class_source import may_complete

PLAIN = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.replace("Model:", "Model(object):"),
        f'"""The class is named TritonPythonModel."""\nimport numpy as np\n{PLAIN}\nprint(TritonPythonModel)\n',
        f"class Base:\n    pass\n{PLAIN}",
    ],
)
def test_a_plain_class_cannot_complete(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.py").write_text(text)
    assert not may_complete(tmp_path / "model.py")
    namespace: dict[str, type] = {}
    exec(text, namespace)
    assert not hasattr(namespace["TritonPythonModel"], "auto_complete_config")


@pytest.mark.parametrize(
    "text",
    [
        f"{PLAIN}\n    @staticmethod\n    def auto_complete_config(config):\n        return config\n",
        f"{PLAIN}\nTritonPythonModel.auto_complete_config = lambda config: config\n",
        f"from helper import Base\n{PLAIN.replace('Model:', 'Model(Base):')}",
        f"import helper\n{PLAIN.replace('Model:', 'Model(metaclass=type(helper.Base)):')}",
        f"import helper as h\n@lambda c: h.Base\n{PLAIN}",
        f"{PLAIN}\nfrom helper import Base as TritonPythonModel\n",
        f"{PLAIN}\nimport helper\nTritonPythonModel = helper.Base\n",
        f"{PLAIN}\nfrom helper import *\n",
        "import helper\nif True:\n    TritonPythonModel = helper.Base\n",
        f"{PLAIN}\nfrom helper import Base\nclass TritonPythonModel(Base):\n    pass\n",
        "from helper import Base\ndef make():\n    global TritonPythonModel\n"
        "    class TritonPythonModel(Base):\n        pass\nmake()\n",
        PLAIN + "#" * (1 << 20),
        PLAIN + "if\n",
        PLAIN + "\0",
        "print(1)\n",
    ],
)
def test_all_other_files_may(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.py").write_text(text)
    assert may_complete(tmp_path / "model.py")


def test_a_file_may_complete_if_the_parser_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 raises this if two threads parse and a garbage collection comes in between."""

    def fails(text: bytes) -> NoReturn:
        raise SystemError("AST constructor recursion depth mismatch (before=45, after=40)")

    monkeypatch.setattr("headrace_python.class_source.ast", SimpleNamespace(parse=fails))
    (tmp_path / "model.py").write_text(PLAIN)
    assert may_complete(tmp_path / "model.py")
