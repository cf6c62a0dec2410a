"""Set the shapes of inputs before a graph is compiled: the config's dims, and a batch axis for any number."""

from __future__ import annotations

from typing import Any

from headrace import LoadError, Model
from headrace_openvino.openvino_api import reword
from headrace_openvino.openvino_files import read_model
from headrace_openvino.ports import fixed_batch
from headrace_openvino.tile_repair import repair_tiles


def open_model(core: Any, model: Model) -> Any:
    """Return the ``openvino.Model`` of the version's file, with the shapes of config and parameters.

    Raises `LoadError` naming the file at fault, or the parameter that the graph does not support.
    """
    opened = read_model(core, model)
    repair_tiles(opened)
    if model.parameters.reshape_io_layers:
        _give_dims(opened, model)
    if not model.parameters.skip_dynamic_batchsize:
        _free_batch(opened, model)
    return opened


def _give_dims(opened: Any, model: Model) -> None:
    """Set the dims of the inputs to those of the config, except the batch axis."""
    skipped = 1 if model.config.max_batch_size > 0 else 0
    dims = {io.name: [*(io.reshape.shape if io.HasField("reshape") else io.dims)] for io in model.config.input}
    shapes = {
        name: [*list(port.get_partial_shape())[:skipped], *dims[name]]
        for port in opened.inputs
        for name in port.get_names()
        if name in dims
    }
    try:
        opened.reshape(shapes)
    except Exception as error:  # pybind has its own exception classes
        raise LoadError(f"unable to load model '{model.name}': RESHAPE_IO_LAYERS: {reword(error)}") from error


def _free_batch(opened: Any, model: Model) -> None:
    """Make the first axis of all inputs variable, if the file has fixed it at one number and the config batches.

    A batch axis of ``max_batch_size`` stays, because the graph was made for it.
    """
    if model.config.max_batch_size <= 0 or fixed_batch(opened, model.config):
        return
    shapes = [port.get_partial_shape() for port in opened.inputs]
    if any(shape.rank.is_dynamic or len(shape) == 0 or shape[0].is_dynamic for shape in shapes):
        return
    rows = {shape[0].get_length() for shape in shapes}
    if len(rows) != 1:
        return
    try:
        opened.reshape({port: [-1, *list(shape)[1:]] for port, shape in zip(opened.inputs, shapes, strict=True)})
    except Exception as error:  # pybind has its own exception classes
        raise LoadError(
            f"unable to load model '{model.name}': the graph is made for batches of {rows.pop()} and no others, which "
            f"max_batch_size {model.config.max_batch_size} asks for: {reword(error)}"
        ) from error
