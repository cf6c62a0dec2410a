"""SavedModels: a directory with ``saved_model.pb``, the variables beside it, and files that the graph names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import DecodeError

from headrace import LoadError, Model, one_line, read_regular, why_path_leaves
from headrace_engines import GraphTensor
from headrace_tf.model_graph import Checkpoint, ModelGraph, default_of, graph_of, needed_nodes, tensor_of

log = logging.getLogger("headrace.tensorflow")

_TAG, _SIGNATURE = "serve", "serving_default"
#: Signatures that are not for callers: the initialization at load, and a training step.
_INIT, _TRAIN = "__saved_model_init_op", "__saved_model_train_op"
#: Operators that hold a variable.
_VARIABLES = frozenset(("VarHandleOp", "VariableV2", "Variable"))
#: Collections in which files of TensorFlow 1 name the operators that run at load, and the files that these read.
_INIT_COLLECTIONS, _ASSETS_COLLECTION = ("saved_model_main_op", "legacy_init_op"), "saved_model_assets"


def read_saved_model(tensorflow: Any, model: Model, path: Path) -> ModelGraph:
    """Return the graph and the signature that the parameters choose.

    Raises `LoadError` naming the file, and `ConfigError` for a tag or a signature that is not in it.
    """
    meta = _choose_graph(model, path, _parse(model, path))
    signature = _choose_signature(model, meta)
    config = model.config
    inputs = {name: signature.inputs[name] for name in sorted(signature.inputs)}
    outputs = {name: signature.outputs[name] for name in sorted(signature.outputs)}
    defaults = _defaults(tensorflow, meta.graph_def, signature, inputs)
    return ModelGraph(
        path,
        meta.graph_def,
        graph_of(config, _tensors(tensorflow, inputs, config), _tensors(tensorflow, outputs, config), defaults.keys()),
        {name: info.name for name, info in inputs.items()},
        {name: info.name for name, info in outputs.items()},
        {name for name, info in (inputs | outputs).items() if info.tensor_shape.unknown_rank},
        defaults,
        _checkpoint(model, meta, path, [info.name for info in outputs.values()]),
        _assets(model, meta, path),
        tuple(_init_ops(meta)),
    )


def _parse(model: Model, path: Path) -> Any:
    from tensorflow.core.protobuf import saved_model_pb2

    binary, text = path / "saved_model.pb", path / "saved_model.pbtxt"
    found = binary if binary.is_file() or not text.is_file() else text
    lead = f"unable to load model '{model.name}': '{found}'"
    try:
        if found is text:
            saved = text_format.Parse(read_regular(text).decode(), saved_model_pb2.SavedModel())
        else:
            saved = saved_model_pb2.SavedModel.FromString(read_regular(binary))
    except OSError as error:
        raise LoadError(
            f"{lead}: {error.strerror}; a SavedModel is a directory with that file, and a frozen "
            'graph has platform: "tensorflow_graphdef"'
        ) from error
    except (DecodeError, text_format.ParseError, UnicodeDecodeError) as error:
        raise LoadError(f"{lead} is no SavedModel: {one_line(str(error))}") from error
    if not saved.meta_graphs:
        raise LoadError(
            f"{lead} is no SavedModel: there is no graph in it. A frozen graph is served as model.graphdef, a file"
        )
    return saved


def _choose_graph(model: Model, path: Path, saved: Any) -> Any:
    """Return the graph with the tag and no other; else the first that has the tag among others."""
    tag = model.parameters.graph_tag or _TAG
    tags = [set(meta.meta_info_def.tags) for meta in saved.meta_graphs]
    for is_chosen in (lambda each: each == {tag}, lambda each: tag in each):
        for meta, each in zip(saved.meta_graphs, tags, strict=True):
            if is_chosen(each):
                return meta
    there = "; ".join(",".join(sorted(each)) for each in tags)
    raise LoadError(
        f"unable to load model '{model.name}', expected '{one_line(tag)}' tag; the graphs of '{path}' have: "
        f"{one_line(there) or 'none'}"
    )


def _choose_signature(model: Model, meta: Any) -> Any:
    """Return the signature of the parameter, else ``serving_default``, else the first one for callers."""
    configured = model.parameters.signature_def
    callable_names = sorted(set(meta.signature_def) - {_INIT, _TRAIN})
    name = configured or _SIGNATURE
    if name in meta.signature_def:
        return meta.signature_def[name]
    if configured or not callable_names:
        there = one_line(", ".join(callable_names)) or "none"
        raise LoadError(f"unable to load model '{model.name}', expected '{one_line(name)}' signature; it has: {there}")
    log.warning(
        "unable to find default serving signature '%s', using signature '%s'",
        name,
        one_line(callable_names[0]),
        extra={"model": model.name},
    )
    return meta.signature_def[callable_names[0]]


def _tensors(tensorflow: Any, infos: Mapping[str, Any], config: Any) -> dict[str, GraphTensor]:
    return {
        name: tensor_of(tensorflow, name, info.dtype, info.tensor_shape, info.WhichOneof("encoding") == "name", config)
        for name, info in infos.items()
    }


def _defaults(tensorflow: Any, graph_def: Any, signature: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of inputs: from the signature, or from the graph."""
    found = {name: default_of(tensorflow, graph_def, info.name) for name, info in inputs.items()}
    found |= {name: tensorflow.make_ndarray(proto) for name, proto in signature.defaults.items() if name in inputs}
    return {name: value for name, value in found.items() if value is not None}


def _checkpoint(model: Model, meta: Any, path: Path, outputs: Iterable[str]) -> Checkpoint | None:
    """Return how to restore the variables. Raises `LoadError` if the outputs need some and their files are missing."""
    restore = meta.saver_def.restore_op_name
    prefix = path / "variables" / "variables"
    index = prefix.with_suffix(".index")
    if restore and index.is_file():
        return Checkpoint(restore, meta.saver_def.filename_tensor_name, prefix)
    if restore and any(node.op in _VARIABLES for node in needed_nodes(meta.graph_def, outputs)):
        raise LoadError(f"unable to load model '{model.name}': no file '{index}', and the graph has variables")
    return None


def _assets(model: Model, meta: Any, path: Path) -> dict[str, Path]:
    """Return the files that the graph reads while it loads, which lie in ``assets``."""
    assets = {}
    for asset in _asset_files(meta):
        if reason := why_path_leaves(asset.filename):
            raise LoadError(
                f"unable to load model '{model.name}': '{path}' names the asset '{one_line(asset.filename)}', which "
                f"must stay in its directory 'assets': {reason}"
            )
        assets[asset.tensor_info.name] = path / "assets" / asset.filename
    return assets


def _asset_files(meta: Any) -> list[Any]:
    from tensorflow.core.protobuf import meta_graph_pb2

    if meta.asset_file_def or _ASSETS_COLLECTION not in meta.collection_def:
        return list(meta.asset_file_def)
    found = []
    for packed in meta.collection_def[_ASSETS_COLLECTION].any_list.value:
        asset = meta_graph_pb2.AssetFileDef()
        if packed.Unpack(asset):
            found.append(asset)
    return found


def _init_ops(meta: Any) -> Iterable[str]:
    if _INIT in meta.signature_def:
        return [meta.signature_def[_INIT].outputs[_INIT].name]
    for collection in _INIT_COLLECTIONS:
        if collection in meta.collection_def:
            return list(meta.collection_def[collection].node_list.value)
    return []
