"""Models that return unwritten memory. PyTorch alone first shows that it is another caller's."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LoadError
from headrace_torch.program_check import LIBRARIES
from headrace_torch.unsafe_operators import UNCHECKED, UNWRITTEN, ZEROED

CONFIG = 'input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }'
COUNT = 16384
X = np.zeros(COUNT, np.float32)


class Returns(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def with_code(rewrite: Callable[..., None], path: Path, code: str) -> None:
    """Let the ``forward`` of `Returns` in the file ``path`` return ``code``."""
    rewrite(path, {".py": lambda data: data.replace(b"return x", f"return {code}".encode())})


def leaks(run: Callable[[], Any], unwritten_byte: int) -> bool:
    """True if an answer of ``run`` holds memory that it has not written, and another caller's tensor may have used."""
    return bool((np.ascontiguousarray(run()).view(np.uint8) == unwritten_byte).any())


ZEROES = [
    "torch.empty([16384])",
    "torch.empty([16384], dtype=6, layout=0, device=torch.device(\"cpu\"), pin_memory=False, memory_format=0)",
    "torch.empty([1, 4, 64, 64], memory_format=2)",
    "torch.empty_like(x)",
    "x.empty_like()",
    "torch.new_empty(x, [16384])",
    "x.new_empty([128, 128])",
    "torch.empty_permuted([128, 128], [1, 0])",
    "ops.aten.empty([16384])",
    "ops.prims.empty([16384], dtype=6, device=torch.device(\"cpu\"), requires_grad=False)",
    "torch.empty([16384], out=torch.zeros([0]))",
    "torch.detach(torch.empty([16384])[1:])",
]  # fmt: skip


@pytest.mark.parametrize("code", ZEROES)
def test_unwritten_memory_of_a_script_is_zero(scripts: Any, rewrite: Any, unwritten_byte: int, code: str) -> None:
    with_code(rewrite, scripts.save(Returns()), code)
    trusted = scripts.load(None, CONFIG, trust=True, warm_up=False)
    assert leaks(lambda: trusted.execute({"x": X})["y"], unwritten_byte), (
        "the operator writes, and this test shows nothing"
    )
    instance = scripts.load(None, CONFIG)
    for _ in range(3):  # compiled in the second execution
        assert not instance.execute({"x": X})["y"].any()


@pytest.mark.parametrize(
    "code",
    [
        "torch.resize_(torch.zeros([1]), [16384])",
        "torch.zeros([1]).resize_([16384])",
        "torch.resize(torch.zeros([1]), [16384])",
        "torch.resize_as_(torch.zeros([1]), x)",
        "torch.set_(torch.zeros([1]), torch.zeros([1]), 0, [16384], [1])",
        "torch.as_strided(torch.empty_strided([2], [16383]), [16384], [1])",
        "torch.as_strided(torch.new_empty_strided(x, [2], [16383]), [16384], [1])",
        "torch.dequantize(torch._empty_affine_quantized([16384], dtype=13))",
        "torch._make_dep_token()",
    ],
)
def test_a_script_that_returns_unwritten_memory_is_refused(scripts: Any, rewrite: Any, code: str) -> None:
    with_code(rewrite, scripts.save(Returns()), code)
    with pytest.raises(LoadError, match=r"'aten::\w+', which returns memory that it has not written; .*'trust'"):
        scripts.load(None, CONFIG)
    scripts.load(None, CONFIG, trust=True)


@pytest.mark.parametrize(
    "code",
    [
        "torch.clone(torch._reshape_alias(x, [1000000], [1]))",
        "x._reshape_alias([1000000], [1]).clone()",
        "torch.to_dense(torch._sparse_coo_tensor_unsafe(torch.tensor([[1000000]]), torch.ones([1]), [16384]))",
    ],
)
def test_a_script_that_reads_beyond_its_tensors_is_refused(scripts: Any, rewrite: Any, code: str) -> None:
    with_code(rewrite, scripts.save(Returns()), code)
    with pytest.raises(LoadError, match=r"'aten::\w+', which does not check its arguments about memory; .*'trust'"):
        scripts.load(None, CONFIG)
    scripts.load(None, CONFIG, trust=True, warm_up=False)


class Inner(torch.nn.Module):
    def forward(self, n: int) -> torch.Tensor:
        return torch.empty([n])


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # PyTorch's advice to export

    @torch.jit.interface
    class Makes(torch.nn.Module):
        def forward(self, n: int) -> torch.Tensor:  # type: ignore[empty-body]
            pass

    @torch.jit.script
    class Holder:
        def __init__(self) -> None:
            self.made = torch.zeros([1])

        def get(self, n: int) -> torch.Tensor:
            return torch.empty([n])


def make(n: int) -> torch.Tensor:
    return torch.empty([n])


class Hides(torch.nn.Module):
    """Makes memory in a submodule, behind an interface, in a class, a function, a task, a loop and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.behind = Inner(), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.numel()
        task = torch.jit.fork(make, n)  # type: ignore[no-untyped-call]
        last = x
        for _ in range(2):
            if n > 1:
                last = torch.empty_like(x)
        waited = torch.jit.wait(task)  # type: ignore[no-untyped-call]
        return torch.cat([self.inner(n), self.behind(n), Holder().get(n), make(n), waited, last])


Hides.__annotations__ = {"behind": Makes}


@pytest.mark.usefixtures("unwritten_byte")
def test_hidden_operators_are_zeroed_too(scripts: Any) -> None:
    instance = scripts.load(Hides(), CONFIG, warm_up=False)
    for _ in range(3):
        assert not instance.execute({"x": X})["y"].any()


class KeepsState(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stored = torch.zeros(1)

    @torch.jit.export
    def __getstate__(self) -> int:
        return 0

    @torch.jit.export
    def __setstate__(self, state: int) -> None:
        self.training = False
        self.stored = torch.empty([16384])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stored


def test_memory_that_a_script_keeps_while_it_is_loaded_is_refused(scripts: Any) -> None:
    scripts.save(KeepsState())
    with pytest.raises(LoadError, match="its '__setstate__' calls 'aten::empty', which may keep memory"):
        scripts.load(None, CONFIG)
    scripts.load(None, CONFIG, trust=True)


class Writes(torch.nn.Module):
    """Ordinary models use such an operator like this."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.empty([2, x.size(0)])
        made[0] = x
        made[1].fill_(3)
        return made


def test_a_script_that_writes_its_new_memory_is_served(scripts: Any) -> None:
    instance = scripts.load(Writes(), CONFIG)
    for _ in range(3):
        np.testing.assert_array_equal(instance.execute({"x": X + 1})["y"], np.stack([X + 1, np.full_like(X, 3)]))


# ---------------------------------------------------------------------- programs of torch.export


class Made(torch.nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self.kind == "empty_like":
            return torch.empty_like(x)
        if self.kind == "new_empty":
            return x.new_empty((COUNT,))
        if self.kind == "empty_permuted":
            return torch.empty_permuted((128, 128), (1, 0))
        return torch.empty(COUNT)


@pytest.mark.parametrize("kind", ["empty", "empty_like", "new_empty", "empty_permuted"])
def test_unwritten_memory_of_a_program_is_zero(programs: Any, unwritten_byte: int, kind: str) -> None:
    path = programs.save(Made(kind), torch.from_numpy(X))
    by_pytorch = torch.export.load(str(path)).module()
    assert leaks(lambda: by_pytorch(torch.from_numpy(X)), unwritten_byte), (
        "the operator writes, and this test shows nothing"
    )
    instance = programs.load()
    assert not instance.execute({"x": X})["OUTPUT__0"].any()


def test_a_program_that_returns_unwritten_memory_is_refused(programs: Any, rewrite: Any) -> None:
    path = programs.save(Made("empty_like"), torch.from_numpy(X))

    def change(data: bytes) -> bytes:
        document = json.loads(data)
        (node,) = document["graph_module"]["graph"]["nodes"]
        node["target"] = "torch.ops.aten.resize_.default"
        return json.dumps(document).encode()

    rewrite(path, {"model.json": change})
    with pytest.raises(LoadError, match=r"calls 'torch\.ops\.aten\.resize_\.default', which returns memory"):
        programs.load()


# ---------------------------------------------------------------------- all operators

#: Operators with such a name that write all that they return, or return none of their own.
WRITTEN = {
    "_copy_from_and_resize", "_has_same_storage_numel", "_nested_tensor_storage_offsets", "_storage_use_count",
    "storage_offset", "sym_storage_offset", "set_grad_enabled",
}  # fmt: skip


def test_no_allowed_operator_has_the_name_of_one_that_does_not_write() -> None:
    """A newer PyTorch may have operators that were not reviewed."""
    names = {full.partition("::")[2].partition(".")[0] for full in torch._C._dispatch_get_all_op_names()
             if full.partition("::")[0] in LIBRARIES}  # fmt: skip
    suspects = {name for name in names if re.search("empty|resize|uninit|storage|^set_|^set$|alloc|unsafe_tens", name)}
    assert suspects - ZEROED - UNWRITTEN - UNCHECKED - WRITTEN == set()
    assert suspects > ZEROED
