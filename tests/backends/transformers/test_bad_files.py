"""Models that are damaged, hostile, or of another kind: the error names what is wrong, and nothing is run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from shutil import copytree
from types import MappingProxyType
from typing import Any

import pytest
import torch

from headrace import ConfigError, HeadraceError, LoadError, Model, ModelConfig, parse_parameters
from headrace_transformers import Parameters, Transformers, transformers_library
from tests.backends.transformers import tiny_models

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("good"))


def load(version: Path, parameters: Mapping[str, str] = MappingProxyType({}), is_sent: bool = False) -> ModelConfig:
    """Complete the config and load, as the server does; close at once."""
    config = ModelConfig(name="m", backend="transformers")
    for name, value in parameters.items():
        config.parameters[name].string_value = value
    backend = Transformers({})
    model = Model("m", 1, version, config, parse_parameters(Parameters, config.parameters), is_sent=is_sent)
    backend.complete_config(model)
    shared = backend.share(model)
    backend.load(Model("m", 1, version, config, model.parameters, shared, "m_0", is_sent=is_sent)).close()
    backend.unshare(shared)
    return config


def edit(name: str = "config.json", **changes: Any) -> Damage:
    def change(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(document | changes))

    return change


def write(name: str, text: str | bytes) -> Damage:
    def overwrite(folder: Path) -> None:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return overwrite


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def remove(*names: str) -> Damage:
    def unlink(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return unlink


def weights(header: str | bytes | dict[str, Any], data: int = 64) -> Damage:
    """Replace the file of weights by one with ``header`` and ``data`` zeros."""
    text = json.dumps(header) if isinstance(header, dict) else header
    text = text.encode() if isinstance(text, str) else text
    return write("model.safetensors", len(text).to_bytes(8, "little") + text + bytes(data))


def tensor(shape: Any, *offsets: Any, **more: Any) -> dict[str, Any]:
    return {"lm_head.weight": {"dtype": "F32", "shape": shape, "data_offsets": list(offsets), **more}}


def fifo(name: str) -> Damage:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return replace


INDEX = {"weight_map": {"lm_head.weight": "../../../secret.safetensors"}}


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (truncate, r"model.safetensors is truncated: it has \d+ bytes, its header needs \d+"),
        (write("model.safetensors", b"\0"), "is not a complete safetensors file"),
        (write("model.safetensors", b"\x02\0\0\0\0\0\0\0[]"), "its header is no JSON object"),
        (write("model.safetensors", b"\xff" * 99), "is not a complete safetensors file"),
        (remove("model.safetensors"), "no file of weights"),
        (pickle_weights, "pytorch_model.bin: pickled weights may run code .* parameter 'trust' to 'true'"),
        (write("model.safetensors.index.json", json.dumps(INDEX)), "names '../../../secret.safetensors', expected"),
        (remove("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
        (write("tokenizer.json", "{}"), "unable to load model 'm'"),
        (remove("config.json"), "no file .*config.json"),
        (write("config.json", "{"), "config.json is not JSON"),
        (write("config.json", "[" * 9999), "config.json is not JSON"),
        (write("config.json", "[]"), "is not the config of a model"),
        (edit(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, but its weights have 21 tensors"),
        (edit(vocab_size=10**9), "describes a model of .* numbers, but its weights have"),
        (edit(hidden_size=10**40), "hidden_size is 1000.*, the limit is"),
        (edit(num_hidden_layers=3), "has no weights for model.layers.2"),
        (edit(hidden_size=64), "unable to load model 'm'|has no weights"),
        (edit(model_type="no-such-kind"), "unable to load model 'm'.*no-such-kind"),
        (edit(model_type="bert"), "unable to load model 'm'|has no weights"),
        (edit(model_type="mine", auto_map={"AutoConfig": "evil.Config"}), "it runs code of its own"),
        (write("adapter_config.json", "{}"), "has an adapter"),
        (write("model.safetensors", (10**15).to_bytes(8, "little") + b"{}"), "is not a complete safetensors file"),
        (weights("[" * 10**5), "is not a safetensors file: maximum recursion depth"),
        (weights(b'{"\xff": {}}'), "is not a safetensors file: 'utf-8' codec"),
        (weights(b"[" + b"[]," * (1 << 21) + b"1]", 0), "commas and brackets, the limit is 4194304"),
        (weights(tensor([16], 0, 64) | {"b": tensor([16], 0, 64)["lm_head.weight"]}), "SafetensorError: .*offset"),
        (weights(tensor([16], 64, 0)), "tensor 'lm_head.weight' has no shape"),
        (weights(tensor(["x", 10**10], 0, 64)), "tensor 'lm_head.weight' has no shape"),
        (weights(tensor([16], "0", "64")), "tensor 'lm_head.weight' has no shape"),
        (weights(tensor([10**12], 0, 64)), "describes 1000000000000 numbers in .* bytes"),
        (weights({"lm_head.weight": 7}), "tensor 'lm_head.weight' has no shape"),
        (write("config.json", b" " * (9 << 20)), "config.json has more than 8388608 bytes"),
        (write("config.json", b"\xff\xfe{}"), "config.json is not JSON"),
        (edit(hidden_size="many"), "unable to load model 'm'"),
        (edit(eos_token_id={"a": []}, rope_parameters=7), "unable to load model 'm'"),
        (edit(num_local_experts=10**8), "num_local_experts is 100000000, but its weights have 21 tensors"),
        (write("tokenizer.json", "[" * 10**5), "unable to load model 'm'"),
        (write("tokenizer.json", b"[" + b"[]," * (1 << 21) + b"1]"), "tokenizer.json has .* commas and brackets"),
        (edit("tokenizer.json", model={"type": "BPE", "vocab": 7, "merges": []}), "unable to load model 'm'"),
        (write("tokenizer_config.json", '{"a":' * 10**5), "unable to load model 'm'"),
        (write("generation_config.json", "[]"), "unable to load model 'm'"),
        (edit("generation_config.json", eos_token_id=1.5), "eos_token_id is 1.5, expected a token"),
        (fifo("tokenizer.json"), "unable to read .*tokenizer.json: .* FIFO"),
        (fifo("model.safetensors"), "unable to read .*model.safetensors: .* FIFO"),
    ],
    ids=range(45),
)
def test_a_damaged_model_is_refused_by_name(good: Path, tmp_path: Path, damage: Damage, why: str) -> None:
    folder = copytree(good, tmp_path / "1")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    damage(folder)
    with pytest.raises(LoadError, match=why):
        load(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"task": "painting"}, "parameter 'task' is 'painting', expected one of generation, embedding"),
        ({"dtype": "int3"}, "parameter 'dtype' is 'int3', expected one of auto, float32"),
        ({"max_running": "0"}, "parameter 'max_running' is 0, expected a number from 1"),
        ({"pooling": "sum"}, "parameter 'pooling' is 'sum', expected one of mean"),
        ({"folder": "../../../etc"}, "it climbs out"),
        ({"attention": "no_such"}, "unable to load model 'm'"),
        ({"task": "classification"}, "has no weights for .* is 'classification' the task of this model"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_refused_by_name(good: Path, parameters: dict[str, str], why: str) -> None:
    with pytest.raises((ConfigError, LoadError), match=why):
        load(good, parameters)


def test_a_model_that_is_sent_may_not_ask_for_trust(good: Path) -> None:
    with pytest.raises(ConfigError, match="parameter 'trust' of model 'm' came with a load request"):
        load(good, {"trust": "true"}, is_sent=True)


@pytest.mark.parametrize("version", ["4.57.1", "5.16.1", "5.25.0", "6.0.0", "x"])
def test_another_version_of_transformers_is_refused(version: str) -> None:
    expected = rf"transformers {version} is installed; .* 5.17 up to, and without, 5.25; .*'transformers>=5.17,<5.25'"
    with pytest.raises(LoadError, match=expected):
        transformers_library.check_version(version)


def test_the_version_is_checked_at_load(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_library, "SUPPORTED", ((4, 0), (5, 0)))
    with pytest.raises(LoadError, match=r"transformers 5.* is installed; .* from 4.0 up to, and without, 5.0"):
        load(good)


def test_the_declared_versions_are_those_that_are_checked() -> None:
    declared = (Path(__file__).parents[3] / "backends/transformers/pyproject.toml").read_text()
    (least, below) = (".".join(map(str, each)) for each in transformers_library.SUPPORTED)
    assert f'"transformers>={least},<{below}"' in declared


def test_nothing_is_fetched(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for files that are missing, or a base model in the hub."""

    def refuse(*args: object) -> None:
        raise AssertionError("the network is used")

    folder = copytree(good, tmp_path / "1")
    edit(_name_or_path="someone/something")(folder)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(HeadraceError):
        load(folder)


def test_a_model_may_lie_in_a_folder(good: Path, tmp_path: Path) -> None:
    copytree(good, tmp_path / "1" / "hub")
    config = load(tmp_path / "1", {"folder": "hub"})
    assert "messages" in [each.name for each in config.input]
    assert config.model_transaction_policy.decoupled
