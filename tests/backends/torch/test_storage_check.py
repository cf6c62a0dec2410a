"""Files whose tensors declare a larger size than their data: PyTorch alone fills them with adjacent memory."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LoadError
from headrace_torch.pickle_check import TensorStorage, oversized, storages

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:ComplexHalf")

CONFIG = 'input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }'
COUNT = 16384
MODULE = f"""
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros({COUNT}))

    def forward(self, x):
        return self.weight
"""


class Weight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((COUNT,), 7.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight


def shorten(rewrite: Callable[..., None], path: Path, record: str = "data/0") -> None:
    rewrite(path, {record: lambda data: data[:8]})


def test_a_script_whose_weight_ends_early_is_refused(scripts: Any, rewrite: Any) -> None:
    path = scripts.save(Weight())
    shorten(rewrite, path)
    by_pytorch = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    assert by_pytorch.weight[:2].tolist() == [7.0, 7.0]
    assert by_pytorch.weight.shape == (COUNT,), "PyTorch refuses it, and this test shows nothing"
    for trust in (False, True):
        with pytest.raises(LoadError, match=r"damaged at 'data\.pkl': tensor '0' has 65536 bytes, .* 8 of them"):
            scripts.load(None, CONFIG, trust=trust)


def test_a_constant_of_a_script_that_ends_early_is_refused(scripts: Any, rewrite: Any) -> None:
    frozen = torch.jit.freeze(torch.jit.script(Weight().eval()))
    path = scripts.root / "m" / "1" / "model.pt"
    path.parent.mkdir(parents=True)
    frozen.save(str(path))
    scripts.load(None, CONFIG)
    shorten(rewrite, path, "constants/0")
    with pytest.raises(LoadError, match=r"damaged at 'constants\.pkl': tensor '0' has \d+ bytes, .* 8 of them"):
        scripts.load(None, CONFIG)


def test_weights_that_end_early_are_refused(modules: Any, rewrite: Any) -> None:
    """PyTorch 2.13 refuses them itself, and 2.6 does not."""
    path = modules.write(MODULE) / "model.pt"
    torch.save({"weight": torch.full((COUNT,), 7.0)}, path)
    modules.load(None, CONFIG)
    shorten(rewrite, path)
    with pytest.raises(LoadError, match=r"tensor '0' has 65536 bytes, and the file has 8 of them"):
        modules.load(None, CONFIG)


def test_old_weights_that_are_not_in_the_file_are_refused(modules: Any) -> None:
    path = modules.write(MODULE) / "model.pt"
    torch.save({"weight": torch.full((COUNT,), 7.0)}, path, _use_new_zipfile_serialization=False)
    modules.load(None, CONFIG)
    stream = io.BytesIO(path.read_bytes())
    for _ in range(4):
        list(pickletools.genops(stream))
    path.write_bytes(stream.getvalue()[: stream.tell()] + pickle.dumps([], 2))
    assert torch.load(path)["weight"].shape == (COUNT,), "PyTorch refuses it, and this test shows nothing"
    with pytest.raises(LoadError, match=r"tensor '\d+' is not in the file"):
        modules.load(None, CONFIG)


#: Types that tensors of models have; PyTorch saves no others without a warning.
TYPES = sorted(
    name
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}" and not re.match("q|bits|u?int[1-7]$", name)
)


@pytest.mark.parametrize("name", TYPES)
def test_storages_of_all_types(tmp_path: Path, name: str) -> None:
    """The oracle is a file that PyTorch writes."""
    torch.save(torch.empty(3, dtype=getattr(torch, name)), tmp_path / "tensor.pt")
    reader = torch._C.PyTorchFileReader(str(tmp_path / "tensor.pt"))
    assert list(storages(torch, reader.get_record("data.pkl"))) == [
        TensorStorage("0", reader.get_record_size("data/0"))
    ]


@pytest.mark.parametrize(
    "persistent_id",
    [
        ("storage", "torch.FloatStorage", "0", "cpu", 4),
        ["storage", torch.FloatStorage, "0", "cpu", 4],
        ("storage", torch.FloatStorage, "0", "cpu", -4),
        ("storage", torch.FloatStorage, "0", "cpu", 4.0),
        ("storage", torch.nn.Linear, "0", "cpu", 4),
        ("module", torch.FloatStorage, "0", "cpu", 4),
        None,
    ],
)
def test_a_storage_that_pytorch_does_not_write_is_refused(persistent_id: Any) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return persistent_id if isinstance(value, torch.Tensor) else None

    stream = io.BytesIO()
    Pickler(stream, 2).dump({"weight": torch.zeros(4)} if persistent_id is not None else 1)
    content = stream.getvalue() if persistent_id is not None else b"\x80\x02Q."
    with pytest.raises(ValueError, match=r"way of its own|of the type|too little"):
        list(storages(torch, content))


class Older:
    """A reader of PyTorch before 2.12, which has no function for the size of a record."""

    def __init__(self, path: Path) -> None:
        reader: Any = torch._C.PyTorchFileReader(str(path))
        self.get_record, self.has_record = reader.get_record, reader.has_record


def test_older_readers_find_the_same(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(COUNT)}, tmp_path / "m.pt")
    reader = Older(tmp_path / "m.pt")
    assert oversized(torch, reader, "data") == ""
    cut = reader.get_record
    reader.get_record = lambda name: cut(name)[:-4] if name == "data/0" else cut(name)
    assert (
        oversized(torch, reader, "data")
        == f"tensor '0' has {4 * COUNT} bytes, and the file has {4 * COUNT - 4} of them"
    )
