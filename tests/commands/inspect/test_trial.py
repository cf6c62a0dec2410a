"""Problems that only a load finds."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.commands.inspect.checking import BACKEND, PICKY, checked, write


def test_a_model_that_does_not_load_or_warm_up_is_a_problem(
    repository: Path, headrace: Callable[..., Any], distribute: Callable[[str, str], None]
) -> None:
    distribute("picky", BACKEND)
    write(repository, "broken", PICKY)
    (repository / "broken" / "1" / "model.py").write_text("1\n2\n3\n")
    warm = 'model_warmup { name: "w" batch_size: 1 inputs { key: "a" value { data_type: TYPE_FP32 dims: 1 %s } } }'
    write(repository, "cold", PICKY + warm % 'input_data_file: "one"')
    (repository / "cold" / "warmup").mkdir()
    (repository / "cold" / "warmup" / "one").write_bytes(struct.pack("f", 1.0))
    write(repository, "warm", PICKY + warm % "zero_data: true")
    code, found, stderr = checked(headrace, str(repository))
    assert code == 1
    assert found["warm"]["problems"] == found["echo"]["problems"] == []
    (problem,) = found["broken"]["problems"]
    assert (problem["file"], problem["line"]) == (str(repository / "broken" / "1" / "model.py"), 3)
    assert problem["message"].startswith("ValueError: boom")
    (problem,) = found["cold"]["problems"]
    assert (problem["field"], problem["line"]) == ("model_warmup", 5)
    assert "failed to run warmup sample 'w'" in problem["message"]
    # Output of models is never among the reports.
    assert "printed by warm" in stderr
    assert "written to stdout" in stderr


def test_no_load_starts_no_engine(
    repository: Path, headrace: Callable[..., Any], distribute: Callable[[str, str], None]
) -> None:
    distribute("picky", BACKEND.replace("def load", "def complete_config(self, model):\n        1 / 0\n    def load"))
    write(repository, "broken", PICKY)
    write(repository, "incomplete", 'backend: "picky"')
    write(repository, "wrong", PICKY.replace("dims: 1", "dims: 0", 1))
    code, found, stderr = checked(headrace, "--no-load", str(repository))
    assert {name: len(one["problems"]) for name, one in found.items()} == {
        "broken": 0, "echo": 0, "incomplete": 0, "wrong": 1,
    }  # fmt: skip
    assert (code, stderr) == (1, "")
