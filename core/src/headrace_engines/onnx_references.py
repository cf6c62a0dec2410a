"""Checks an ONNX file before an engine reads it: the files that it names, and if it has loops.

The named files (weights, and graphs that an accelerator has compiled) must be in the model's directory. Not all engines
check this: ONNX Runtime before about 1.23 read any file of the server, and even its memory if a name was an address.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from headrace import LoadError, one_line, open_regular, read_regular, why_path_leaves
from headrace_engines.onnx_reduction import reduced

#: The prefix of an address in the engine's memory.
_ADDRESS = "*/_ORT_MEM_ADDR_"
#: The node of a graph that an accelerator has compiled, and its attributes.
_COMPILED = b"EPContext"
_NAMING = frozenset((b"location", _COMPILED))
_LOOP = b"Loop"
_COMPILED_FILE, _IS_EMBEDDED, _SOURCE_FILE = b"ep_cache_context", b"embed_mode", b"onnx_model_filename"

_PIECE_BYTES = 1 << 20

_BYTES, _INT64, _MESSAGE = 12, 3, 11
#: The fields of ``onnx.proto`` on the way to a file's name: message, then field, number and type.
_SCHEMA: dict[str, dict[str, tuple[int, str | int]]] = {
    "Model": {"graph": (7, "Graph"), "training_info": (20, "Training"), "functions": (25, "Function")},
    "Training": {"initialization": (1, "Graph"), "algorithm": (2, "Graph")},
    "Graph": {"node": (1, "Node"), "initializer": (5, "Tensor"), "sparse_initializer": (15, "Sparse")},
    "Function": {"node": (7, "Node"), "attribute_proto": (11, "Attribute")},
    "Node": {"op_type": (4, _BYTES), "attribute": (5, "Attribute")},
    "Attribute": {
        "name": (1, _BYTES),
        "i": (3, _INT64),
        "s": (4, _BYTES),
        "t": (5, "Tensor"),
        "g": (6, "Graph"),
        "tensors": (10, "Tensor"),
        "graphs": (11, "Graph"),
        "sparse_tensor": (22, "Sparse"),
        "sparse_tensors": (23, "Sparse"),
    },
    "Sparse": {"values": (1, "Tensor"), "indices": (2, "Tensor")},
    "Tensor": {"external_data": (13, "Entry")},
    "Entry": {"key": (1, _BYTES), "value": (2, _BYTES)},
}


class OnnxFile(NamedTuple):
    """The result of `read_onnx_file`: the names of weight files, once each, and True if the graph may have a loop.

    The number of runs of a loop depends on the request. ``repeats`` is also True if the file only contains the word,
    besides the values of weights.
    """

    weights: list[str]
    repeats: bool


def read_onnx_file(path: Path, folder: Path) -> OnnxFile:
    """Return the references of the ONNX graph in the file ``path``. Reads the file once, without values of weights.

    Raises `LoadError` if it names a file outside the model's directory ``folder``, which contains ``path``. A file that
    is not an ONNX graph passes: the engine reads or refuses it.
    """
    # the path may leave the version's directory again: 1/../model.onnx
    inside = posixpath.normpath(path.relative_to(folder))
    levels, weights = inside.count("/"), {}
    mentioned = _mentioned(path, {*_NAMING, _LOOP})
    for name, is_weights in () if mentioned.isdisjoint(_NAMING) else _names(path):
        if is_weights:
            weights[name] = True
        reason = "it is an address in memory" if name.startswith(_ADDRESS) else why_path_leaves(name, levels)
        if not reason and ".." in name.lstrip("./").split("/"):
            reason = "it goes up again with '..'"  # behind a link, that is anywhere
        if reason:
            raise LoadError(
                f"'{path}' names the file '{one_line(name)}', which must stay in the model directory: {reason}"
            )
    return OnnxFile(list(weights), _LOOP in mentioned)


def check_onnx_references(path: Path, folder: Path) -> list[str]:
    """Return the names of the weight files of the ONNX graph in the file ``path``, as `read_onnx_file`."""
    return read_onnx_file(path, folder).weights


def onnx_repeats(path: Path) -> bool:
    """Return `OnnxFile.repeats` of the file ``path``."""
    return bool(_mentioned(path, {_LOOP}))


def _mentioned(path: Path, words: set[bytes]) -> set[bytes]:
    """Return the ``words`` that occur in the file outside of the values of weights.

    A file that is no graph, or mostly no weights, is read in pieces, so that other threads can run.
    """
    if (text := reduced(path)) is not None:
        return {word for word in words if word in text}
    found, rest, longest = set[bytes](), b"", max(map(len, words))
    with open_regular(path) as file:
        while piece := file.read(_PIECE_BYTES):
            text = rest + piece
            found |= {word for word in words if word in text}
            rest = text[1 - longest :]
    return found


def _names(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the names of files, each with True if it has weights."""
    model = _Model()
    try:
        model.ParseFromString(read_regular(path))
    except DecodeError:  # the engine reports it; or the file has the engine's own format
        return
    yield from _in_message(model)


def _in_message(message: Any) -> Iterator[tuple[str, bool]]:
    kind = message.DESCRIPTOR.name
    if kind == "Entry" and message.key == b"location":
        yield message.value.decode(errors="replace"), True
    elif kind == "Node" and message.op_type == _COMPILED:
        yield from ((name, False) for name in _in_compiled(message.attribute))
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value:
                yield from _in_message(part)


def _in_compiled(attributes: Iterable[Any]) -> Iterator[str]:
    is_embedded = all(attribute.i for attribute in attributes if attribute.name == _IS_EMBEDDED)
    for attribute in attributes:
        if attribute.name == _SOURCE_FILE or (attribute.name == _COMPILED_FILE and not is_embedded):
            yield attribute.s.decode(errors="replace")


def _make() -> type[Message]:
    """Return the message ``Model``. Every message field is repeated, so that a second one hides none."""
    file = descriptor_pb2.FileDescriptorProto(name="references.proto", syntax="proto2")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            message.field.add(
                name=field,
                number=number,
                label=3 if isinstance(kind, str) else 1,  # repeated, optional
                type=_MESSAGE if isinstance(kind, str) else kind,
                type_name=f".{kind}" if isinstance(kind, str) else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Model"))


_Model = _make()
