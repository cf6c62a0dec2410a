"""Files that would do more than compute. PyTorch alone first shows that each does."""

from __future__ import annotations

import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LoadError

CONFIG = """input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }"""


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Saves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, "PATH")
        return x


class Prints(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Restored(torch.nn.Module):
    """Loading it calls ``__setstate__``, and thereby ``count``."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 3

    def count(self, n: int) -> int:
        return n + 1

    @torch.jit.export
    def __getstate__(self) -> tuple[int, bool]:
        return (self.n, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[int, bool]) -> None:
        self.n = self.count(state[0])
        self.training = state[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.n


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def rewrite(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, change(name, data))


def test_an_ordinary_network_loads(scripts: Any) -> None:
    scripts.load(Plain(), CONFIG)


def test_code_that_writes_a_file_is_not_loaded_without_trust(scripts: Any, tmp_path: Path) -> None:
    path, written = scripts.save(Saves()), tmp_path / "written"
    rewrite(path, lambda _, data: data.replace(b"PATH", str(written).encode()))
    with pytest.raises(LoadError, match=r"calls 'torch.save', which may touch files.*'trust' to 'true'"):
        scripts.load(None, CONFIG)
    scripts.load(None, CONFIG, trust=True).execute({"x": torch.ones(1).numpy()})
    assert written.exists(), "the file was harmless, and this test shows nothing"


@pytest.mark.parametrize(
    "code",
    [
        'torch.from_file("/etc/passwd", False, 4)',
        'torch . save(x, "p")',
        'getattr(torch, "sa" "ve")(x, "p")',
        'getattr(torch, "sa\\x76e")(x, "p")',
        'ops.aten.save(x, "p")',
        'ops.image.read_file("p")',
        "__torch__.torch.classes.dist_c10d.FileStore()",
        "'torch'",
        'r"x"',
        "not ( python",
        "x \\\n",
    ],
)
def test_other_spellings_are_refused_too(scripts: Any, code: str) -> None:
    path = scripts.save(Prints())
    rewrite(path, lambda name, data: data.replace(b"return x", f"y = {code}\n    return x".encode()))
    with pytest.raises(LoadError, match="may do more than compute"):
        scripts.load(None, CONFIG)


@pytest.mark.parametrize("place", ["__setstate__", "count"])
def test_a_loop_that_loading_would_run_is_refused_and_no_other(scripts: Any, place: str) -> None:
    """It might never end, and PyTorch holds the interpreter's lock while it loads."""
    path = scripts.save(Restored())
    assert scripts.load(None, CONFIG).execute({"x": torch.ones(1).numpy()})["y"].tolist() == [5.0]
    loop = b"i = 0\n    while torch.gt(i, 3):\n      i = torch.add(i, 1)\n    "

    def add_loop(name: str, data: bytes) -> bytes:
        before, behind = data.partition(f"def {place}(".encode())[::2]
        if not (name.endswith(".py") and behind):
            return data
        first = behind.index(b":\n    ") + 6
        return before + f"def {place}(".encode() + behind[:first] + loop + behind[first:]

    rewrite(path, add_loop)
    with pytest.raises(LoadError, match=r"runs a loop when it is loaded \('__setstate__'\).*'trust' to 'true'"):
        scripts.load(None, CONFIG)
    assert scripts.load(None, CONFIG, trust=True).execute({"x": torch.ones(1).numpy()})["y"].tolist() == [5.0]


@pytest.mark.parametrize("record", ["data.pkl", "constants.pkl"])
def test_a_pickle_that_runs_code_runs_none(scripts: Any, tmp_path: Path, record: str) -> None:
    made = tmp_path / "made"
    path = scripts.save(Prints())
    evil = pickle.dumps(Runs(made), 2)
    rewrite(path, lambda name, data: evil if name.endswith(f"/{record}") else data)
    for trust in (False, True):
        with pytest.raises(LoadError, match=r"model\.pt"):
            scripts.load(None, CONFIG, trust=trust)
    assert not made.exists()
    pickle.loads(evil)
    assert made.exists(), "the pickle was harmless, and this test shows nothing"


@pytest.mark.parametrize("content", [b"", b"no model", b"PK\x05\x06" + bytes(18)])
def test_a_broken_file_is_named(scripts: Any, content: bytes) -> None:
    scripts.save(Prints()).write_bytes(content)
    with pytest.raises(LoadError, match=r"failed to load model 'm': '.*model\.pt'"):
        scripts.load(None, CONFIG)


def test_a_truncated_file_is_named(scripts: Any) -> None:
    path = scripts.save(Prints())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LoadError, match=r"failed to load model 'm': '.*model\.pt'"):
        scripts.load(None, CONFIG)


def test_a_state_dict_is_no_torchscript(scripts: Any) -> None:
    path = scripts.save(Prints())
    with warnings.catch_warnings():
        torch.save(Plain().state_dict(), path)
    with pytest.raises(LoadError, match="is not TorchScript"):
        scripts.load(None, CONFIG)
