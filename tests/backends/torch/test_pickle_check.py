"""Pickles that PyTorch's readers do not bear are refused before they are read; all that it writes is not."""

from __future__ import annotations

import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LoadError
from headrace_torch import pickle_check

CONFIG = """input { name: "x" data_type: TYPE_FP32 dims: [4] } output { name: "y__0" data_type: TYPE_FP32 dims: [4] }"""
MODULE = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.w
"""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_python_are_undamaged(protocol: int) -> None:
    values: list[Any] = [None, True, 1, 300, 1 << 20, 1 << 80, -(1 << 3000), 1.5, "text", "λ" * 300, b"x" * 300,
              {"a": [1]}, (1, 2, 3, 4), {1, 2}, frozenset((3,)), OrderedDict(a=Path("/")), bytearray(b"y"),
              [list(range(2000))], "many words " * 9000]  # fmt: skip
    content = pickle.dumps(values, protocol)
    assert pickle_check.damage(content) == ""
    assert pickle_check.damage(content * 5, count=5) == ""
    assert pickle_check.damage(content, count=2) == ""
    for length in range(0, len(content), 997):
        assert pickle_check.damage(content[:length])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02X\xff\xff\xff\xffabc.", "expected 4294967295 bytes in a unicodestring4, but only 4 remain"),
        (b"\x80\x02\x8d" + b"\xff" * 7 + b"\x0f.", "expected"),
        (b"\x80\x02Nr\xff\xff\xff\xff.", "at byte 3, it remembers more objects than it has bytes"),
        (b"\x80\x02c" + b"A" * 5000 + b"\nx\n.", "at byte 2, it has a name of more than 4096 characters"),
        (b"\x80\x02\xfe.", "at position 2, opcode b'\\xfe' unknown"),
        (b"\x80\x02cposix", "no newline found"),
        (b"", "pickle exhausted before seeing STOP"),
    ],
)
def test_the_error_for_a_harmful_pickle_has_its_position(content: bytes, message: str) -> None:
    assert message in pickle_check.damage(content)


def with_name(size: int) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\n%s\n" % (b"A" * size))


def test_long_names_are_refused_at_once(modules: Any, rewrite: Callable[[Path, Mapping[str, Any]], None]) -> None:
    """PyTorch's words for it would take minutes, and hold the interpreter's lock."""
    folder = modules.write(MODULE)
    torch.save({"w": torch.ones(4)}, folder / "model.pt")
    rewrite(folder / "model.pt", {"data.pkl": with_name(70_000)})
    began = time.process_time()
    with pytest.raises(LoadError, match=r"model\.pt': it is damaged, .* a name of more than 4096 characters"):
        modules.load(None, CONFIG)
    assert time.process_time() - began < 20


def test_weights_of_an_old_pytorch_are_checked_too(modules: Any) -> None:
    folder = modules.write(MODULE)
    torch.save({"w": torch.ones(4)}, folder / "model.pt", _use_new_zipfile_serialization=False)
    modules.load(None, CONFIG)
    content = (folder / "model.pt").read_bytes()
    (folder / "model.pt").write_bytes(with_name(70_000)(content))
    with pytest.raises(LoadError, match="a name of more than 4096 characters"):
        modules.load(None, CONFIG)


@pytest.mark.parametrize(
    ("bomb", "message"),
    [(b"X\xff\xff\xff\xff", "expected 4294967295 bytes"), (b"r\xff\xff\xff\xff", "at byte 3")],
    ids=["text", "memo"],
)
def test_a_script_that_declares_gigabytes_allocates_none(
    scripts: Any, rewrite: Callable[[Path, Mapping[str, Any]], None], bomb: bytes, message: str
) -> None:
    path = scripts.save(torch.nn.Identity())
    rewrite(path, {"data.pkl": lambda content: content[:2] + b"N" + bomb + b"." + content[2:]})
    with pytest.raises(LoadError, match=rf"model\.pt' is damaged at 'data\.pkl': {message}"):
        scripts.load(None, CONFIG)
