"""A config of a load request makes the server read no file outside the model."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from google.protobuf.text_format import Parse

from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import HeadraceError
from headrace.server import Server

CANARY = "c4n4ry-bytes"
CONFIG = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: [2] zero_data: true } } }
"""


def string_fields(message: Message, depth: int = 0) -> Iterator[tuple[str, Callable[[str], None]]]:
    """Every string field of ``message``, made to exist, with what sets it."""
    for field in message.DESCRIPTOR.fields:
        entry = field.message_type
        if entry is None:
            if field.cpp_type == field.CPPTYPE_STRING:
                yield field.name, _setter(message, field.name, field.is_repeated)
        elif entry.GetOptions().map_entry:
            inner = entry.fields_by_name["value"]
            container = getattr(message, field.name)
            if inner.message_type is None and inner.cpp_type == inner.CPPTYPE_STRING:
                yield field.name, lambda value, container=container: container.update({"k": value})  # type: ignore[misc]
            elif inner.message_type is not None:
                number = entry.fields_by_name["key"].cpp_type != field.CPPTYPE_STRING
                key: Any = next(iter(container), 1 if number else "x")
                for name, setter in string_fields(container[key], depth + 1):
                    yield f"{field.name}.{name}", setter
        elif depth < 3:
            value = getattr(message, field.name)
            child = (value[0] if len(value) else value.add()) if field.is_repeated else value
            for name, setter in string_fields(child, depth + 1):
                yield f"{field.name}.{name}", setter


def _setter(message: Message, name: str, is_repeated: bool) -> Callable[[str], None]:
    if is_repeated:
        return lambda value: getattr(message, name).append(value)
    return lambda value: setattr(message, name, value)


FIELDS = [name for name, _ in string_fields(ModelConfig())]


def config_with(field: str, value: str) -> ModelConfig:
    """The model above, with ``field`` set to ``value`` and without the file that was made to find the field."""
    config = Parse(CONFIG, ModelConfig())
    dict(string_fields(config))[field](value)
    changed = Parse(CONFIG, ModelConfig())
    top = field.partition(".")[0]
    changed.ClearField(top)  # type: ignore[arg-type]
    changed.MergeFrom(ModelConfig(**{top: getattr(config, top)}))
    return changed


def test_the_fields_that_name_files_are_among_them() -> None:
    assert {"default_model_filename", "output.label_filename", "model_warmup.inputs.input_data_file"} <= set(FIELDS)
    assert len(FIELDS) > 25


def test_no_string_of_a_config_discloses_a_file(
    write_model: Any,
    make_server: Callable[..., Server],
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    caplog.set_level(logging.DEBUG)
    write_model("m", CONFIG)
    outside = tmp_path / "canary.txt"
    outside.write_text(f"{CANARY}\n" * 8)
    (repository / "canary.txt").write_text(f"{CANARY}\n" * 8)

    messages: list[str] = []

    async def scenario() -> None:
        async with make_server(model_control_mode="explicit", load_model=("m",)) as server:
            for field in FIELDS:
                for value in (str(outside), "../canary.txt", "../../canary.txt", f"file://{outside}"):
                    for files in ({}, {"file:1/weights": b""}):
                        text = MessageToJson(config_with(field, value))
                        try:
                            await server.load("m", {"config": text, **files})
                        except HeadraceError as error:
                            messages.append(error.message)
                        for model in server.served():
                            assert CANARY not in repr((model.labels, model.config, model.inputs, model.outputs)), field
            assert CANARY not in repr(server.index())

    asyncio.run(asyncio.wait_for(scenario(), 50))
    assert messages
    assert CANARY not in "".join(messages)
    assert CANARY not in caplog.text
