"""The weights beside a ``model.py``: valid, damaged, and pickles that run code, as PyTorch alone first shows."""

from __future__ import annotations

import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace import ConfigError, LoadError

CONFIG = 'input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [3] } '
LINEAR = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)

    def forward(self, x):
        return self.layer(x)
"""
WEIGHT = torch.arange(6, dtype=torch.float32).reshape(3, 2)
BIAS = torch.tensor([1.0, 2, 3])
STATE = {"layer.weight": WEIGHT, "layer.bias": BIAS}
X = np.array([10, 1], np.float32)
Y = WEIGHT.numpy() @ X + BIAS.numpy()


class Runs:
    """Unpickled, it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Net(torch.nn.Module):
    """Like the model's own class, but pickled as a whole, by this name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        self.load_state_dict(STATE)


@pytest.fixture
def folder(modules: Any) -> Path:
    path: Path = modules.write(LINEAR)
    return path


def save_legacy(state: Any, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("save", "name"),
    [(torch.save, "model.pt"), (save_legacy, "model.pt"), (save_file, "model.safetensors")],
    ids=["zip", "legacy", "safetensors"],
)
def test_weights_are_those_of_the_file(modules: Any, folder: Path, save: Any, name: str) -> None:
    save(STATE, folder / name)
    np.testing.assert_array_equal(modules.load(None, CONFIG).execute({"x": X})["y"], Y)


def test_weights_have_the_name_of_the_code(modules: Any, folder: Path) -> None:
    (folder / "model.py").rename(folder / "net.py")
    torch.save(STATE, folder / "net.pt")
    torch.save({}, folder / "model.pt")
    found = modules.load(None, 'default_model_filename: "net.py"' + CONFIG).execute({"x": X})["y"]
    np.testing.assert_array_equal(found, Y)


def test_weights_do_not_depend_on_the_file_later(modules: Any, folder: Path) -> None:
    """Truncating a mapped file would crash the process."""
    torch.save(STATE, folder / "model.pt")
    instance = modules.load(None, CONFIG)
    (folder / "model.pt").write_bytes(b"")
    np.testing.assert_array_equal(instance.execute({"x": X})["y"], Y)


def test_weights_that_were_compressed_since_are_the_same(modules: Any, folder: Path, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as stored,
        zipfile.ZipFile(folder / "model.pt", "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in stored.namelist():
            archive.writestr(name, stored.read(name))
    np.testing.assert_array_equal(modules.load(None, CONFIG).execute({"x": X})["y"], Y)


def test_two_files_of_weights_are_one_too_many(modules: Any, folder: Path) -> None:
    torch.save(STATE, folder / "model.pt")
    save_file(STATE, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"model\.pt': 'model\.safetensors' lies beside it"):
        modules.load(None, CONFIG)


def test_weights_that_do_not_fit_are_listed(modules: Any, folder: Path) -> None:
    torch.save({"layer.weight": WEIGHT[:2], "head": BIAS}, folder / "model.pt")
    with pytest.raises(LoadError) as raised:
        modules.load(None, CONFIG)
    assert f"failed to load model 'm': '{folder / 'model.pt'}': does not fit the class Net:" in raised.value.message
    for part in (
        'Missing key(s) in state_dict: "layer.bias".',
        'Unexpected key(s) in state_dict: "head".',
        "size mismatch for layer.weight: copying a param with shape torch.Size([2, 2]) from checkpoint",
    ):
        assert part in raised.value.message


@pytest.mark.parametrize("is_legacy", [False, True])
def test_a_pickle_that_runs_code_runs_none(modules: Any, folder: Path, tmp_path: Path, is_legacy: bool) -> None:
    made = tmp_path / "made"
    (save_legacy if is_legacy else torch.save)({**STATE, "layer.bias": Runs(made)}, folder / "model.pt")
    with pytest.raises(LoadError, match=r"names 'posix\.mkdir', which could run code.*'trust' to 'true'"):
        modules.load(None, CONFIG)
    assert not made.exists()
    with pytest.raises(LoadError):
        modules.load(None, CONFIG, trust=True)  # no weights, but the code has run
    assert made.exists(), "the pickle was harmless, and this test shows nothing"


def test_a_bare_pickle_that_runs_code_runs_none(modules: Any, folder: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (folder / "model.pt").write_bytes(pickle.dumps(Runs(made), 2))
    with pytest.raises(LoadError, match=r"names 'posix\.mkdir', which could run code"):
        modules.load(None, CONFIG)
    assert not made.exists()
    pickle.loads((folder / "model.pt").read_bytes())
    assert made.exists(), "the pickle was harmless, and this test shows nothing"


def test_a_whole_module_is_unpickled_only_with_trust(modules: Any, folder: Path) -> None:
    torch.save(Net(), folder / "model.pt")
    with pytest.raises(LoadError, match=r"names '.*test_weights\.Net', which could run code"):
        modules.load(None, CONFIG)
    np.testing.assert_array_equal(modules.load(None, CONFIG, trust=True).execute({"x": X})["y"], Y)


def test_trust_from_a_load_request_is_refused(modules: Any, folder: Path, tmp_path: Path) -> None:
    torch.save({"x": Runs(tmp_path / "made")}, folder / "model.pt")
    with pytest.raises(ConfigError, match="came with a load request: it counts in the repository only"):
        modules.load(None, CONFIG, is_sent=True, trust=True)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no weights", b"PK\x05\x06" + bytes(18), b"\x80\x02."], ids=range(4))
def test_a_damaged_file_is_named(modules: Any, folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(LoadError, match=rf"failed to load model 'm': '.*{name}': "):
        modules.load(None, CONFIG)


def test_a_truncated_file_is_named(modules: Any, folder: Path) -> None:
    torch.save(STATE, folder / "model.pt")
    (folder / "model.pt").write_bytes((folder / "model.pt").read_bytes()[:-100])
    with pytest.raises(LoadError, match=r"model\.pt': PytorchStreamReader failed reading zip archive"):
        modules.load(None, CONFIG)


@pytest.mark.parametrize(
    "content", [[WEIGHT, BIAS], ["layer.weight"], {1: WEIGHT}], ids=["tensors", "names", "numbers"]
)
def test_a_file_without_a_dictionary_of_weights_is_refused(modules: Any, folder: Path, content: Any) -> None:
    torch.save(content, folder / "model.pt")
    with pytest.raises(LoadError, match=r"it holds a (list|dict), not the weights of a module by their names"):
        modules.load(None, CONFIG)


def test_torchscript_beside_code_is_refused(modules: Any, folder: Path, scripts: Any) -> None:
    scripts.save(torch.nn.Linear(2, 3))
    with pytest.raises(LoadError, match=r"model\.pt': .*TorchScript"):
        modules.load(None, CONFIG)


def test_the_error_names_missing_safetensors(modules: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(STATE, folder / "model.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(LoadError, match=r"run: pip install 'headrace-torch\[safetensors\]'"):
        modules.load(None, CONFIG)
