"""Completion of a config from a model file, and the check that the two agree.

Source: docs/spec/behaviours.md sections 10.1 and 10.2, with Triton's words.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from headrace import ConfigError, DataType, LoadError, ModelConfig, ModelInput, ModelOutput, Spec, dtypes, one_line
from headrace_engines.graph import Graph, GraphTensor

log = logging.getLogger(__name__)


def default_max_batch_size(backend: str, options: Mapping[str, str]) -> int:
    """Return N of ``--backend-config=<backend>,default-max-batch-size=N``; 4 unless set.

    Raises `ConfigError` if it is not a whole number. Source: docs/spec/behaviours.md section 4.3.
    """
    text = options.get("default-max-batch-size")
    if text is None:
        return 4
    try:
        return max(0, int(text))
    except ValueError:
        raise ConfigError(
            f"backend option default-max-batch-size of '{backend}' must be a whole number, got '{one_line(text)}'"
        ) from None


def complete_from_graph(config: ModelConfig, graph: Graph, default_max_batch_size: int) -> None:
    """Fill ``max_batch_size``, ``dynamic_batching``, ``input`` and ``output`` of ``config``.

    Outputs that are not tensors are skipped with one warning, unless no output is a tensor. Raises `ConfigError` if the
    config has a batch size and the graph does not batch, and `LoadError` for a tensor that the protocol cannot carry.
    """
    _complete_batching(config, graph, default_max_batch_size)
    skipped = 1 if config.max_batch_size > 0 else 0
    if not config.input and not config.batch_input:
        for info in graph.inputs.values():
            _describe(config.input.add(), info, "input", config.name, skipped)
    if not config.output:
        for info in _servable(graph.outputs.values(), config.name):
            _describe(config.output.add(), info, "output", config.name, skipped)


def _servable(outputs: Collection[GraphTensor], model: str) -> Collection[GraphTensor]:
    """Return the outputs that are tensors, and warn of the others; return all if none is a tensor."""
    tensors = [info for info in outputs if info.is_tensor]
    if not tensors or len(tensors) == len(outputs):
        return outputs
    others = [f"'{info.name}' is {info.type}" for info in outputs if not info.is_tensor]
    log.warning(
        "model '%s': outputs that are not tensors are left out: %s",
        model,
        one_line(", ".join(others)),
        extra={"model": model},
    )
    return tensors


def _complete_batching(config: ModelConfig, graph: Graph, default_max_batch_size: int) -> None:
    tensors = [info for info in (*graph.inputs.values(), *graph.outputs.values()) if info.is_tensor]
    infos = [info for info in tensors if not info.is_shape_tensor]
    if not all(info.batches for info in infos) or not _hints_agree(config, graph):
        if config.max_batch_size > 0:
            raise ConfigError(
                f"autofill failed for model '{config.name}': model does not support batching while non-zero "
                "max_batch_size is specified"
            )
        return
    if config.max_batch_size == 0:
        config.max_batch_size = default_max_batch_size
        log.info("model '%s': max_batch_size completed to %d", config.name, default_max_batch_size)
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()


def _hints_agree(config: ModelConfig, graph: Graph) -> bool:
    """True if the dims in the config, after ``reshape``, have no batch axis."""
    declared: Iterable[ModelInput | ModelOutput] = chain(config.input, config.output)
    known = {**graph.inputs, **graph.outputs}
    return all(
        len(io.reshape.shape if io.HasField("reshape") else io.dims) + 1 == len(known[io.name].shape)
        for io in declared
        if io.name in known and not known[io.name].is_shape_tensor
    )


def _describe(io: ModelInput | ModelOutput, info: GraphTensor, direction: str, model: str, skipped: int) -> None:
    io.name = info.name
    io.data_type = info.require_datatype(direction, model).config_value  # type: ignore[assignment]
    if info.is_shape_tensor:
        io.is_shape_tensor = True
        io.dims.extend(dim - skipped for dim in info.shape)
    else:
        io.dims.extend(dim or -1 for dim in info.shape[skipped:])  # a config may not have 0
    if not io.dims:
        io.dims.append(1)
        if skipped and not info.is_shape_tensor:
            io.reshape.SetInParent()


def check_against_graph(config: ModelConfig, graph: Graph) -> None:
    """Raise `ConfigError` in Triton's words for the first difference, or `LoadError` for an unsupported type."""
    controls = [control.name for control in config.sequence_batching.control_input]
    states = [state.input_name for state in config.sequence_batching.state]
    known = {*(io.name for io in config.input), *controls, *states}
    made = [info for name, info in Graph.of_config(config).inputs.items() if name not in known]
    _check_controls(config, graph, controls)
    _check_input_count(config, graph, len(controls) + len(states) + len(made))
    for info in made:
        _check_unseen(config, info.name, info.require_datatype("input", config.name), graph.inputs, "input")
    for io in config.input:
        info = _find(io, {**graph.inputs, **graph.optional}, "input")
        _check_optional(config, io)
        _check_datatype(config, io, info, "input")
        _check_shape_tensor(config, io, info, "input")
        if io.allow_ragged_batch:
            _check_ragged(config, io, info)
        else:
            _check_dims(config, io, info, exact=False)
    for state in config.sequence_batching.state:
        datatype = dtypes.BY_CONFIG_VALUE[state.data_type]
        _check_unseen(config, state.input_name, datatype, graph.inputs, "input")
        _check_unseen(config, state.output_name, datatype, graph.outputs, "output")
    scattered = {name for output in config.batch_output for name in output.target_name}
    for output in config.output:
        info = _find(output, graph.outputs, "output")
        _check_datatype(config, output, info, "output")
        _check_shape_tensor(config, output, info, "output")
        if output.name not in scattered:
            _check_dims(config, output, info, exact=True)


def _check_unseen(
    config: ModelConfig, name: str, datatype: DataType, infos: Mapping[str, GraphTensor], direction: str
) -> None:
    """Check a tensor that the server computes or stores, and clients do not send, against the graph."""
    io = ModelInput(name=name, data_type=datatype.config_value)  # type: ignore[arg-type]
    _check_datatype(config, io, _find(io, infos, direction), direction)


def _check_controls(config: ModelConfig, graph: Graph, controls: Iterable[str]) -> None:
    for name in controls:
        if name not in graph.inputs:
            raise LoadError(f"configuration specified sequence control '{name}', but model does not provide that input")
        dims = graph.inputs[name].shape[1 if config.max_batch_size > 0 else 0 :]
        if dims != (1,):
            raise ConfigError(
                f"unable to load model '{config.name}', sequence control '{name}' in model has dims {_bracket(dims)} "
                "but dims [1] is expected"
            )


def _check_input_count(config: ModelConfig, graph: Graph, extra: int) -> None:
    expected = sum(not io.optional for io in config.input) + extra
    if expected != len(graph.inputs):
        raise ConfigError(
            f"unable to load model '{config.name}', configuration expects {expected} inputs, model provides "
            f"{len(graph.inputs)}"
        )


def _find(io: ModelInput | ModelOutput, infos: Mapping[str, GraphTensor], direction: str) -> GraphTensor:
    if io.name not in infos:
        raise ConfigError(
            f"unexpected inference {direction} '{io.name}', allowed {direction}s are: {', '.join(sorted(infos))}"
        )
    return infos[io.name]


def _check_optional(config: ModelConfig, io: ModelInput) -> None:
    if io.optional and config.max_batch_size > 0:
        raise ConfigError(
            f"unable to load model '{config.name}', optional input '{io.name}' is not supported for models that "
            "support batching"
        )


def _check_datatype(config: ModelConfig, io: ModelInput | ModelOutput, info: GraphTensor, direction: str) -> None:
    found = info.require_datatype(direction, config.name)
    if io.data_type != found.config_value:
        expected = dtypes.BY_CONFIG_VALUE[io.data_type].config_name
        raise ConfigError(
            f"unable to load model '{config.name}', configuration expects datatype {expected} for {direction} "
            f"'{io.name}', model provides TYPE_{found.name}"
        )


def _check_shape_tensor(config: ModelConfig, io: ModelInput | ModelOutput, info: GraphTensor, direction: str) -> None:
    """Check the mark of shape tensors, in the words of Triton's TensorRT backend (docs/spec/behaviours.md section
    10.5)."""
    what = f"{direction} '{io.name}' for model '{config.name}' is"
    if info.is_shape_tensor and not io.is_shape_tensor:
        raise ConfigError(f"{what} a shape tensor but the model configuration doesn't mark it as a shape tensor.")
    if io.is_shape_tensor and not info.is_shape_tensor:
        raise ConfigError(f"{what} incorrectly marked as a shape tensor in the model configuration.")


def _check_ragged(config: ModelConfig, io: ModelInput, info: GraphTensor) -> None:
    lead = (
        f"unable to load model '{config.name}', configuration expects model provides input with shape [-1] "
        f"for ragged input '{io.name}', "
    )
    if io.optional:
        raise ConfigError(lead + "which is not supported for optional input")
    if info.shape != (-1,):
        raise ConfigError(f"{lead}model provides {_bracket(info.shape)}")


def _check_dims(config: ModelConfig, io: ModelInput | ModelOutput, info: GraphTensor, exact: bool) -> None:
    dims = Spec.from_config(io).backend_dims
    lead = f"model '{config.name}', tensor '{io.name}': "
    batched = config.max_batch_size > 0
    if info.is_shape_tensor:
        if dims != (tuple(dim - batched for dim in info.shape) or (1,)):
            raise ConfigError(
                f"unable to load model '{config.name}', binding '{io.name}' shape expected by framework "
                f"{_bracket(info.shape)} doesn't match model configuration shape {_bracket(dims)}"
            )
        return
    if batched and not info.batches:
        raise ConfigError(
            f"{lead}for the model to support batching the shape should have at least 1 dimension and the first "
            f"dimension must be -1; but shape expected by the model is {_bracket(info.shape)}"
        )
    if not info.shape:
        _check_scalar(config, io, dims)
        return
    full = (-1, *dims) if batched else dims
    if _matches(info.shape, full, exact):
        return
    explained = (
        "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making "
        f"complete shape {_bracket(full)}"
        if batched
        else f"shape {_bracket(full)}"
    )
    raise ConfigError(
        f"{lead}the model expects {len(info.shape)} dimensions (shape {_bracket(info.shape)}) but the model "
        f"configuration specifies {len(full)} dimensions ({explained})"
    )


def _check_scalar(config: ModelConfig, io: ModelInput | ModelOutput, dims: Sequence[int]) -> None:
    if any(dim != 1 for dim in dims):
        raise ConfigError(
            f"unable to load model '{config.name}', scalar tensor '{io.name}', should only provide 1 in the model "
            "configuration when the model doesn't support batching. Model configuration provided: "
            f"{_bracket(dims)}."
        )


def _matches(model: Sequence[int], config: Sequence[int], exact: bool) -> bool:
    """True if the config's shape fits the model's. A variable dim of an input may be fixed, and a dim of 0 is -1."""
    return len(model) == len(config) and all(
        ours == (theirs or -1) or (theirs == -1 and not exact) for theirs, ours in zip(model, config, strict=True)
    )


def _bracket(shape: Iterable[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
