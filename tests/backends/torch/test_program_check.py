"""Program files that would do more than compute. PyTorch alone first shows that each does."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LoadError
from headrace_torch.program_check import LIBRARIES, REFUSED, TrustRequired, find_operator
from headrace_torch.program_sizes import Arithmetic

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning"
)  # PyTorch's warning about the files

X = np.array([1, 2, 3], np.float32)


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def in_json(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        document = json.loads(data)
        change(document)
        return json.dumps(document).encode()

    return changed


def code(made: Path) -> str:
    return f"__import__('os').mkdir('{made}')"


def pickled_weight(made: Path) -> dict[str, Any]:
    def change(document: Any) -> None:
        document["config"]["by"]["use_pickle"] = True

    return {"weights_config.json": in_json(change), "weight_0": pickle.dumps(Runs(made))}


def pickled_object(made: Path) -> dict[str, Any]:
    def change(document: Any) -> None:
        document["config"]["o"] = {
            "path_name": "opaque_obj_0",
            "is_param": False,
            "use_pickle": True,
            "tensor_meta": None,
        }

    return {"constants_config.json": in_json(change), "data/constants/opaque_obj_0": pickle.dumps(Runs(made))}


def pickled_weights_of_old(made: Path) -> dict[str, Any]:
    return {"data/weights/model.pt": pickle.dumps(Runs(made))}


def size_that_is_code(made: Path) -> dict[str, Any]:
    def change(document: Any) -> None:
        values = document["graph_module"]["graph"]["tensor_values"]
        values["x"]["sizes"] = [{"as_expr": {"expr_str": code(made), "hint": None}}]

    return {"model.json": in_json(change)}


def operator_that_makes_a_file(made: Path) -> dict[str, Any]:
    def change(document: Any) -> None:
        arguments = {"filename": {"as_string": str(made)}, "shared": {"as_bool": True}, "size": {"as_int": 3}}
        node = {
            "target": "torch.ops.aten.from_file.default",
            "inputs": [{"name": name, "arg": value, "kind": 1} for name, value in arguments.items()],
            "outputs": [{"as_tensor": {"name": "made"}}],
            "metadata": {},
            "name": "made",
        }
        graph = document["graph_module"]["graph"]
        graph["nodes"].append(node)
        graph["tensor_values"]["made"] = graph["tensor_values"]["x"]

    return {"model.json": in_json(change)}


def condition_that_is_code(made: Path) -> dict[str, Any]:
    def change(document: Any) -> None:
        document["guards_code"] = [f"{code(made)} is None"]

    return {"model.json": in_json(change)}


def sample_that_is_pickled(made: Path) -> dict[str, Any]:
    return {"data/sample_inputs/model.pt": pickle.dumps(Runs(made))}


def name_that_is_code(made: Path) -> dict[str, Any]:
    name = json.dumps(f"x={code(made)}").encode()
    return {"model.json": lambda data: data.replace(b'"x"', name)}


REFUSED_FILES = [
    (pickled_weight, "its 'by' is a pickle"),
    (pickled_object, "its 'o' is a pickle"),
    (pickled_weights_of_old, "its 'weights' are one pickle"),
    (size_that_is_code, "where a size is meant, which is no arithmetic"),
    (operator_that_makes_a_file, "it calls 'torch.ops.aten.from_file.default', which does more than compute"),
    (condition_that_is_code, "where a size is meant, which is no arithmetic"),
]
#: What these have is not looked at, since nothing needs it.
HARMLESS_FILES = [sample_that_is_pickled, name_that_is_code]


def run_by_pytorch(path: Path) -> None:
    """Run a program as a server without the check would."""
    with contextlib.suppress(Exception):  # whatever becomes of it after its code has run
        torch.export.load(str(path)).module()(torch.from_numpy(X))


@pytest.mark.parametrize(("make", "message"), REFUSED_FILES, ids=[each.__name__ for each, _ in REFUSED_FILES])
def test_a_program_with_code_is_refused(programs: Any, rewrite: Any, tmp_path: Path, make: Any, message: str) -> None:
    made = tmp_path / "made"
    path = programs.save(Network(), torch.from_numpy(X))
    rewrite(path, make(made))
    with pytest.raises(LoadError, match=rf"model\.pt2' may do more than compute: .*{message}.*'trust' to 'true'"):
        programs.load()
    assert not made.exists()
    run_by_pytorch(path)
    assert made.exists(), "the file was harmless, and this test shows nothing"


@pytest.mark.parametrize("make", HARMLESS_FILES, ids=[each.__name__ for each in HARMLESS_FILES])
def test_pickles_that_pytorch_would_run_are_not_read(programs: Any, rewrite: Any, tmp_path: Path, make: Any) -> None:
    made = tmp_path / "made"
    path = programs.save(Network(), torch.from_numpy(X))
    rewrite(path, make(made))
    instance = programs.load()
    (name,) = [io.name for io in programs.config.input]
    np.testing.assert_array_equal(instance.execute({name: X})["OUTPUT__0"], 2 * X)
    assert not made.exists()
    run_by_pytorch(path)
    assert made.exists(), "the file was harmless, and this test shows nothing"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("torch.ops.aten.from_file.default", "which does more than compute"),
        ("torch.ops.aten._print.default", "which does more than compute"),
        ("torch.ops.c10d.barrier.default", "an operator of the library 'c10d'"),
        ("torch.ops.aten.mul.__init__", "does not have"),
        ("torch.ops.aten.mul._op", "does not have"),
        ("torch.ops.aten.__class__.mro", "does not have"),
        ("torch.ops.higher_order.auto_functionalized", "in a way of its own"),
        ("torch.ops.load_library", "no operator"),
        ("torch.ops.aten.mul.Tensor.x", "no operator"),
        ("#mine:op", "no operator"),
        ("os.system", "no operator"),
        ("torch.os.system", "no operator"),
        ("_operator.methodcaller", "no operator"),
        ("math.__loader__.load_module", "no operator"),
    ],
)
def test_operators_that_may_do_more_are_refused(programs: Any, rewrite: Any, target: str, message: str) -> None:
    path = programs.save(Network(), torch.from_numpy(X))
    rewrite(path, {"model.json": lambda data: data.replace(b"torch.ops.aten.mul.Tensor", target.encode())})
    with pytest.raises(LoadError, match=rf"model\.pt2' .*'{re.escape(target)}'.*{message}"):
        programs.load()


def test_a_word_for_the_code_of_a_graph_is_refused(programs: Any, rewrite: Any) -> None:
    path = programs.save(Network(), torch.from_numpy(X))
    change = {"model.json": lambda data: data.replace(b'"kind": 1', b'"kind": 2').replace(b'"other"', b'"a, **b"')}
    rewrite(path, change)
    with pytest.raises(LoadError, match=r"with 'a, \*\*b', which that does not take"):
        programs.load()


#: What strings that operators take are for. None of these names a file, a library, or code.
PURPOSES = {
    "activation", "algorithm", "api_name", "approximate", "assert_msg", "driver", "equation", "indexing",
    "interpolation", "mode", "norm", "ord", "p", "pad_mode", "padding", "padding_side", "reduce", "rounding_mode",
    "side", "UPLO",
}  # fmt: skip


def test_no_allowed_operator_takes_a_file_name() -> None:
    """A newer PyTorch may have operators that were not reviewed."""
    seen = set()
    for full in torch._C._dispatch_get_all_op_names():
        library, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if library in LIBRARIES and name not in REFUSED and not name.startswith("_test_"):
            schema = torch._C._get_schema(f"{library}::{name}", overload)
            strings = {argument.name for argument in schema.arguments if "str" in str(argument.type)}
            assert strings <= PURPOSES, f"{full} takes {strings - PURPOSES}"
            seen |= strings
    assert "equation" in seen


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Symbol('s0', positive=True, integer=True)", 5),
        ("2*s0 + 1", 11),
        ("Add(Mul(Integer(2), Symbol('s0', integer=True)), Integer(1))", 11),
        ("FloorDiv(Symbol('s0'), Integer(2))", 2),
        ("Max(1, Mod(s0, 3))", 2),
        ("-s0 // 2", -3),
        ("(L['x']['k'][0].size()[1] % 2) != 0", True),
        ("2 <= s0 and s0 <= 4 or s0 == 9", False),
    ],
)
def test_sizes_are_computed(text: str, value: int) -> None:
    assert Arithmetic(text).value({"s0": 5, "L['x']['k'][0].size()[1]": 3}) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('x')",
        "s0.__class__",
        "L['x'].numpy()[0]",
        "L[__import__('os')].size()[0]",
        "[s0][0]",
        "lambda: 1",
        "Symbol(s0)",
        "Symbol('s0', 'x')",
        "Integer(x=1)",
        "print(1)",
        "9**9**9",
        "1.5",
        "'text'",
        "s0 is s0",
        "",
        "(" * 500,
    ],
)
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(TrustRequired, match="which is no arithmetic"):
        Arithmetic(text)


@pytest.mark.parametrize(
    ("target", "left", "right"), [("pow", 3, 1 << 40), ("lshift", 1, 1 << 40), ("mul", 1 << 62, 8)]
)
def test_sizes_are_bounded_while_they_are_computed(target: str, left: int, right: int) -> None:
    """Python would compute numbers of any length, and block all other threads meanwhile."""
    with pytest.raises(OverflowError, match="a size has more than 64 bits"):
        find_operator(torch, f"_operator.{target}")(left, right)


@pytest.mark.parametrize(("left", "right"), [(3, 4), (2, 62), (-2, 3), (1, 1 << 40), (2.0, 0.5), (9, -1), (0, 5)])
def test_sizes_within_bounds_equal_pythons_arithmetic(left: float, right: float) -> None:
    assert find_operator(torch, "_operator.pow")(left, right) == left**right
    assert find_operator(torch, "_operator.mul")(left, right) == left * right
    if isinstance(left, int) and 0 <= right < 64 and isinstance(right, int):
        assert find_operator(torch, "_operator.lshift")(left, right) == (left << right)
