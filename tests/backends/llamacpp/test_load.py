"""Files: which are found, which are refused, and what a model opens besides."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace import ConfigError, LoadError, Model, ModelConfig, Server
from headrace_llamacpp.gguf import read_header
from headrace_llamacpp.llama_server import find_files, find_weights
from headrace_llamacpp.parameters import Parameters
from tests.backends.llamacpp.smol import ask, put_model, text


def test_the_header_says_what_the_model_is(weights: Path) -> None:
    header = read_header(weights)
    assert (header.architecture, header.context_length, header.vocabulary) == ("llama", 8192, 49152)
    assert header.number("embedding_length") == 576
    assert "<|im_start|>" in header.chat_template
    assert 16 < header.longest_token < 1000


def test_a_bad_file_is_refused_with_the_reason(weights: Path, tmp_path: Path) -> None:
    begin = weights.read_bytes()[: 4 << 20]
    bad: Mapping[str, tuple[bytes, str]] = {
        "empty": (b"", "is not a GGUF file: it has 0 bytes"),
        "ten bytes": (begin[:10], "is not a GGUF file: it has 10 bytes"),
        "text": (b"hello " * 100, "is not a GGUF file: it begins with b'hell'"),
        "version": (begin[:4] + b"\x09\0\0\0" + begin[8:], "version 9 of GGUF"),
        "counts": (begin[:8] + b"\xff" * 16 + begin[24:], "is damaged: its header announces"),
        "header cut off": (begin[:5000], "its header does not end within its 5000 bytes"),
        "tensors cut off": (begin, "its tensors need .* bytes or more, and it has 4194304"),
    }
    for name, (content, reason) in bad.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(LoadError, match=reason):
            read_header(path)


def header(*members: bytes, tensors: int = 0, more: bytes = b"") -> bytes:
    """Return the header of a file with ``members``, whose tensors are ``more``."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(members)) + b"".join(members) + more


def array(kind: int, count: int) -> bytes:
    return struct.pack("<Q1sIIQ", 1, b"a", 9, kind, count)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (header(array(0, 10**10)), "an array of 10000000000 numbers, the limit is 16777216"),
        (header(array(8, 10**10)), "arrays of 10000000000 strings, the limit is 4194304"),
        (header(struct.pack("<Q1sIQ", 1, b"a", 8, 10**10)), "strings of 10000000001 bytes, the limit for all of them"),
        (header(struct.pack("<Q", 10**10)), "strings of 10000000000 bytes, the limit for all of them is 67108864"),
        (header(array(10, 1 << 63)), "does not end within"),
        (header(array(9, 1)), "does not end within"),
        (header(tensors=1, more=struct.pack("<Q1sI", 1, b"t", 1 << 31)), "a tensor of 2147483648 axes, the limit is 8"),
    ],
)
def test_a_sparse_file_has_room_for_all_that_its_header_announces_and_is_refused(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    os.truncate(path, 10**12)
    with pytest.raises(LoadError, match=reason):
        read_header(path)


def model_of(version: Path, **parameters: object) -> Model:
    return Model("m", 1, version, ModelConfig(), Parameters(**parameters))  # type: ignore[arg-type]


def test_any_one_gguf_is_found_and_of_several_the_config_must_say_which(weights: Path, tmp_path: Path) -> None:
    version = put_model(tmp_path, "m", weights, {}, "smollm2.gguf")
    assert find_weights(model_of(version)).name == "smollm2.gguf"
    (version / "mmproj.gguf").write_bytes(b"")
    assert find_weights(model_of(version, mmproj="mmproj.gguf")).name == "smollm2.gguf"
    with pytest.raises(
        LoadError, match=r"has 2 files \*.gguf in .*, such as 'mmproj.gguf': set default_model_filename"
    ):
        find_weights(model_of(version))
    (version / "model.gguf").write_bytes(b"")
    assert find_weights(model_of(version)).name == "model.gguf"


def test_no_file_outside_of_the_model_is_opened(weights: Path, tmp_path: Path) -> None:
    version = put_model(tmp_path, "m", weights, {})
    for parameters in (
        {"chat_template": "../../x"},
        {"mmproj": "/etc/passwd"},
        {"lora": {"lora.a": "../../../a.gguf"}},
    ):
        with pytest.raises(LoadError, match="is outside the model directory"):
            find_files(model_of(version, **parameters))
    for parameters in ({"chat_template": "x.jinja"}, {"lora": {"lora.a": "a.gguf"}}):
        with pytest.raises(LoadError, match="no file"):
            find_files(model_of(version, **parameters))


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"slots": 0}, "'slots' must be from 1 to 1024, got 0"),
        ({"context": -1}, "'context' must be from 0"),
        ({"task": "poetry"}, "'task' must be one of generation, embedding, reranking, got 'poetry'"),
        ({"pooling": "max"}, "'pooling' must be one of none, mean, cls, last, rank, got 'max'"),
    ],
)
def test_parameters_are_checked(parameters: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Parameters(**parameters)  # type: ignore[arg-type]


def test_the_signals_of_the_process_are_left_alone(server: Server, signals: list[int]) -> None:
    """Older versions of xllamacpp install handlers of their own."""
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert signals == [signal.SIGTERM, signal.SIGINT]
    assert text(ask(server, "x"))
