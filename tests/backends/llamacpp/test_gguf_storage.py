"""GGUF files with no model repository around them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from headrace import ConfigError, InvalidArgument, LoadError, Server, ServerOptions
from headrace_llamacpp import GgufStorage
from tests.backends.llamacpp.gguf_files import write_adapter, write_gguf, write_tiny
from tests.backends.llamacpp.smol import ask


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "tiny.gguf", 256)
    write_adapter(tmp_path / "adapter.gguf")
    write_gguf(tmp_path / "big-00001-of-00002.gguf", {"general.architecture": "llama", "split.count": 2}, {})
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" * 100)
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "directory.gguf").mkdir()
    (tmp_path / "device.gguf").symlink_to("/dev/zero")
    (tmp_path / "broken.gguf").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo.gguf")
    return tmp_path


def storage_of(url: str) -> GgufStorage:
    return GgufStorage(url, ServerOptions(model_repository=(url,)))


def test_each_file_with_a_model_is_one(folder: Path) -> None:
    storage = storage_of(f"gguf://{folder}")
    assert list(storage.models()) == ["damaged", "tiny"]  # the load of the first says what is wrong with it
    tag = storage.fingerprint("tiny")
    write_tiny(folder / "tiny.gguf", 64)
    assert storage.fingerprint("tiny").keys() == tag.keys() == {"1/model.gguf"}
    assert storage.fingerprint("tiny") != tag
    assert storage.size("tiny", ()) == (folder / "tiny.gguf").stat().st_size
    (folder / "tiny.gguf").unlink()
    assert list(storage.models()) == ["damaged"]
    assert storage.fingerprint("tiny") == {}


def test_a_file_is_served_by_its_name(folder: Path) -> None:
    with Server(f"gguf://{folder}/tiny.gguf") as server:
        (given,) = ask(server, "abc", "return_num_output_tokens", model="tiny")
        assert np.asarray(given.outputs["num_output_tokens"]).tolist() == [8]
        assert [entry.name for entry in server.engine.index()] == ["tiny"]


def test_a_damaged_file_says_why_it_is_not_served(folder: Path) -> None:
    with Server(f"gguf://{folder}", exit_on_error=False) as server:
        reasons = {entry.name: entry.reason for entry in server.engine.index()}
    assert reasons.keys() == {"damaged", "tiny"}
    assert "GGUF" in reasons["damaged"]
    assert not reasons["tiny"]


def test_a_place_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")  # a copy of it has no end
    with pytest.raises(LoadError, match="'/dev/zero' is no regular file"):
        storage_of(f"gguf://{tmp_path}").fetch("zero", (), lambda: tmp_path / "new")
    with pytest.raises(ConfigError, match="does not say where"):
        storage_of("gguf://")
    with pytest.raises(InvalidArgument, match="no file or directory '/no/such/place'"):
        storage_of("gguf:///no/such/place").models()
