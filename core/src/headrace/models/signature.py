"""The inputs and outputs of a model, compiled once at load into checks that run per request.

`Signature.check` is the fast path: a straight line over the inputs that accepts a valid request. For an invalid one,
`explain` applies the same rules in Triton's order and returns an error for the first broken one. Source:
docs/spec/behaviours.md section 3.2.

If several inputs are wrong, Triton names the one that was sent last: its hash table has the newest entry first. (Names
in the same bucket, and more than 13 inputs, are in another order there. That is chance, and is not imitated.) Triton
keeps requested outputs in a sorted set.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from math import prod
from typing import Any

import numpy as np

from headrace.config.config_json import config_to_json
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.padding import PADDING, PaddingRules
from headrace.errors import HeadraceError, InvalidArgument
from headrace.messages import dtypes, strings
from headrace.messages.device_tensor import DeviceTensor
from headrace.messages.request import InferRequest, Undecoded
from headrace.messages.spec import Spec
from headrace.messages.tensor import BytesTensor, Tensor, data_type
from headrace.messages.ticket import Ticket

#: The rows of an input without rows: a shape tensor of a model that batches.
_ANY_ROWS = 1 << 62
#: At most this many layouts of valid requests are remembered.
_MOST_ALIKE = 256
#: At most this many names are listed in a message, followed by the number of the others.
_MAX_NAMES = 100
_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


class Signature:
    """The inputs and outputs of one model version.

    ``inputs`` and ``outputs`` are in config order; their dims exclude the batch axis. Without ``reshapes``, valid
    requests are not reshaped: they are checked again where the model is.
    """

    def __init__(self, name: str, config: ModelConfig, reshapes: bool = True) -> None:
        self.name = name
        self.max_batch_size = config.max_batch_size
        self.batched = config.max_batch_size > 0
        self._most_rows = config.max_batch_size if self.batched else 1
        self.inputs = {io.name: Spec.from_config(io) for io in config.input}
        self.outputs = {io.name: Spec.from_config(io) for io in config.output}
        self.required = sum(not spec.optional for spec in self.inputs.values())
        self._has_optional = self.required < len(self.inputs)
        self._checks = {name: _Check.compile(spec, self.batched) for name, spec in self.inputs.items()}
        shape_tensors = tuple(name for name, spec in self.inputs.items() if spec.is_shape_tensor)
        ragged = frozenset(io.name for io in config.input if io.allow_ragged_batch)
        self._has_key = self._has_optional or any(
            check.is_variable for name, check in self._checks.items() if name not in ragged
        )
        padding = PaddingRules.from_json(config_to_json(config)) if PADDING in config.parameters else None
        self._has_key = self._has_key or padding is not None
        #: Returns what must be equal among the requests of a batch.
        self._key: Callable[[Mapping[str, Any]], tuple[object, ...]] = _key
        if padding is not None:
            self._key = padding.key
        elif ragged:
            self._key = partial(_ragged_key, ragged)
        if shape_tensors:
            self._key = partial(_shape_tensor_key, shape_tensors, self._key)
            self._has_key = True
        self._reshaped = tuple(spec for spec in self.inputs.values() if reshapes and spec.reshape is not None)
        #: Rows and batch key by `InferRequest.alike`. Not used if more than types and shapes counts.
        self._fitting: dict[object, tuple[int, Any]] = {}
        self._remembers = not (self._reshaped or shape_tensors or padding)

    def check(self, ticket: Ticket) -> None:
        """Accept the request of ``ticket`` and set ``rows`` and ``batch_key``, or raise `InvalidArgument`.

        Applies the config's input reshapes: the request is replaced by one with other views.
        """
        request = ticket.request
        alike = request.alike
        if alike is not None:
            fitting = self._fitting.get(alike)
            if fitting is not None:
                ticket.rows, ticket.batch_key = fitting
                return
        inputs, checks = request.inputs, self._checks
        rows = -1
        fits = self.required <= len(inputs) <= len(checks) and (not request.outputs or self._has_all(request.outputs))
        if fits:
            for name, tensor in inputs.items():
                tensor_rows = checks[name].rows(tensor) if name in checks else -1
                if tensor_rows != rows:
                    if tensor_rows == _ANY_ROWS:
                        continue
                    if tensor_rows < 0 or rows >= 0:
                        fits = False
                        break
                    rows = tensor_rows
                elif tensor_rows < 0:
                    fits = False
                    break
        if not fits or rows > self._most_rows or (self._has_optional and self._lacks(inputs)):
            raise explain(self, request)
        ticket.rows = rows if rows >= 0 else 1
        if self._has_key:
            ticket.batch_key = self._key(inputs)
        if self._reshaped:
            reshaped = {
                spec.name: _reshape(inputs[spec.name], spec, self.batched)
                for spec in self._reshaped
                if spec.name in inputs
            }
            ticket.request = request.with_inputs({**inputs, **reshaped})
        if alike is not None and self._remembers:
            if len(self._fitting) >= _MOST_ALIKE:
                self._fitting.clear()
            self._fitting[alike] = ticket.rows, ticket.batch_key

    def wire_shape(self, spec: Spec) -> tuple[int, ...]:
        """Return the dims as in the metadata: with -1 in front if the model batches."""
        return (-1, *spec.dims) if self.batched else spec.dims

    def _has_all(self, names: Sequence[str]) -> bool:
        """True if ``names`` are outputs of this model, each named once."""
        return all(name in self.outputs for name in names) and len(set(names)) == len(names)

    def _lacks(self, inputs: Mapping[str, Any]) -> bool:
        return any(not spec.optional and name not in inputs for name, spec in self.inputs.items())


def _key(inputs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the batch key: requests stack only if they have the same inputs with the same variable dims."""
    if len(inputs) == 1:
        ((name, tensor),) = inputs.items()
        return name, tensor.shape[1:]
    return tuple([(name, tensor.shape[1:]) for name, tensor in sorted(inputs.items())])


def _ragged_key(ragged: Collection[str], inputs: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the batch key without the dims of ``ragged`` inputs, which need not be equal."""
    return tuple([(name, None if name in ragged else tensor.shape[1:]) for name, tensor in sorted(inputs.items())])


def _shape_tensor_key(
    names: Collection[str], key: Callable[[Mapping[str, Any]], tuple[object, ...]], inputs: Mapping[str, Any]
) -> tuple[object, ...]:
    """Return ``key`` with the values of the shape tensors ``names``, which hold for the whole batch."""
    return (*key(inputs), *(inputs[name].tobytes() for name in names if name in inputs))


@dataclass(slots=True)
class _Check:
    """The data type and shape of one input. ``numpy`` is None for strings.

    ``dims`` exclude the batch axis, which exists if ``batched``. Otherwise the input counts as ``rows_without`` rows.
    ``fitted`` are the dims of the last valid tensor; the next one nearly always has the same.
    """

    numpy: np.dtype[Any] | None
    dims: tuple[int, ...]
    is_variable: bool
    batched: bool
    fitted: tuple[int, ...]
    rows_without: int

    @classmethod
    def compile(cls, spec: Spec, batched: bool) -> _Check:
        numpy = None if spec.datatype is dtypes.BYTES else spec.datatype.numpy
        has_rows = batched and not spec.is_shape_tensor
        rows_without = _ANY_ROWS if spec.is_shape_tensor else 1
        return cls(numpy, spec.dims, -1 in spec.dims, has_rows, spec.dims, rows_without)

    def rows(self, tensor: Any) -> int:
        """Return the rows of ``tensor``, 1 for a model without a batch axis; -1 if it is invalid."""
        if self.numpy is None:
            if type(tensor) is not BytesTensor or not tensor.is_complete:
                return -1
        elif (type(tensor) is not np.ndarray and not isinstance(tensor, DeviceTensor)) or (
            tensor.dtype is not self.numpy and tensor.dtype != self.numpy
        ):
            return -1
        shape = tensor.shape
        dims = shape[1:] if self.batched else shape
        if dims != self.fitted:
            if dims != self.dims and not (self.is_variable and _match(self.dims, dims)):
                return -1
            self.fitted = dims
        return (shape[0] if shape else -1) if self.batched else self.rows_without


def _match(expected: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(expected) == len(dims) and all(want in (-1, got) for want, got in zip(expected, dims, strict=True))


def _reshape(tensor: Any, spec: Spec, batched: bool) -> Any:
    batch = tensor.shape[:1] if batched else ()
    return tensor.reshape(batch + spec.apply_reshape(tensor.shape[len(batch) :]))


# ---------------------------------------------------------------------------
# The errors of invalid requests
# ---------------------------------------------------------------------------


def explain(signature: Signature, request: InferRequest) -> HeadraceError:
    """Return the error for the first rule that ``request`` breaks."""
    rules = (_outputs, _count, _unknown, _batch, _inputs)
    reasons = chain.from_iterable(rule(signature, request) for rule in rules)
    return InvalidArgument(next(reasons, f"{request.log_id}request does not fit model '{signature.name}'"))


def bracket(shape: Iterable[int]) -> str:
    """Return a shape as Triton prints it: ``[2,3]``."""
    return f"[{','.join(map(str, shape))}]"


def _outputs(signature: Signature, request: InferRequest) -> Iterator[str]:
    seen = set()
    for name in request.outputs:
        if name in seen:
            yield f"{request.log_id}output '{name}' already exists in request"
        seen.add(name)
    for name in sorted(seen):
        if name not in signature.outputs:
            yield f"unexpected inference output '{name}' for model '{signature.name}'"


def _count(signature: Signature, request: InferRequest) -> Iterator[str]:
    total, required, count = len(signature.inputs), signature.required, len(request.inputs)
    missing = [n for n, spec in signature.inputs.items() if not spec.optional and n not in request.inputs]
    if required <= count <= total and not missing:
        return
    if required < total:
        expected = f"expected number of inputs between {required} and {total} but got {count} inputs"
    elif count != total:
        expected = f"expected {total} inputs but got {count} inputs"
    else:
        return  # the right number with a wrong name: the next rule names it
    yield (
        f"{request.log_id}{expected} for model '{signature.name}'. Got input(s) "
        f"[{_quoted(tuple(request.inputs)[::-1])}], but missing required input(s) [{_quoted(missing)}]. Please "
        "provide all required input(s)."
    )


def _unknown(signature: Signature, request: InferRequest) -> Iterator[str]:
    for name in reversed(tuple(request.inputs)):
        if name not in signature.inputs:
            yield f"unexpected inference input '{name}' for model '{signature.name}'"


def _batch(signature: Signature, request: InferRequest) -> Iterator[str]:
    if not signature.batched:
        return
    rows = None
    for name, tensor in reversed(tuple(request.inputs.items())):
        if signature.inputs[name].is_shape_tensor:
            continue
        if not tensor.shape:
            yield (
                f"{request.log_id}input '{name}' has no shape but model requires batch dimension for '{signature.name}'"
            )
        elif rows is not None and tensor.shape[0] != rows:
            yield f"{request.log_id}input '{name}' batch size does not match other inputs for '{signature.name}'"
        else:
            rows = tensor.shape[0]
    limit = signature.max_batch_size
    if rows is not None and rows > limit:
        yield f"{request.log_id}inference request batch-size must be <= {limit} for '{signature.name}'"


def _inputs(signature: Signature, request: InferRequest) -> Iterator[str]:
    for name, tensor in reversed(tuple(request.inputs.items())):
        for rule in (_datatype, _shape, _size, _strings):
            for reason in rule(signature, name, tensor):
                yield f"{request.log_id}{reason}"


def _datatype(signature: Signature, name: str, tensor: Tensor | Undecoded) -> Iterator[str]:
    got, expected = _datatype_name(tensor), signature.inputs[name].datatype.name
    if got != expected:
        yield f"inference input '{name}' data-type is '{got}', but model '{signature.name}' expects '{expected}'"


def _shape(signature: Signature, name: str, tensor: Tensor | Undecoded) -> Iterator[str]:
    shape, spec = tensor.shape, signature.inputs[name]
    expected = spec.dims if spec.is_shape_tensor else signature.wire_shape(spec)
    if any(dim < 0 for dim in shape):
        yield (
            f"All input dimensions should be specified for input '{name}' for model '{signature.name}', got "
            f"{bracket(shape)}"
        )
    if len(shape) != len(expected) or any(want not in (-1, got) for want, got in zip(expected, shape, strict=True)):
        yield (
            f"unexpected shape for input '{name}' for model '{signature.name}'. Expected {bracket(expected)}, got "
            f"{bracket(shape)}. {_BATCH_NOTE if signature.batched else ''}"
        )


def _size(signature: Signature, name: str, tensor: Tensor | Undecoded) -> Iterator[str]:
    datatype = signature.inputs[name].datatype
    if isinstance(tensor, Undecoded) and datatype is not dtypes.BYTES:
        yield (
            f"input byte size mismatch for input '{name}' for model '{signature.name}'. Expected "
            f"{tensor.element_count * datatype.itemsize}, got {tensor.buffer.nbytes}"
        )


def _strings(signature: Signature, name: str, tensor: Tensor | Undecoded) -> Iterator[str]:
    if not isinstance(tensor, BytesTensor | Undecoded):
        return
    count, rest = _count_strings(tensor.buffer)
    what = f"for inference input '{name}' for model '{signature.name}'"
    expected = prod(tensor.shape)
    if rest is not None and rest < 4:
        yield (
            f"incomplete string length indicator {what}, expecting 4 bytes but only {rest} bytes available. Please "
            "make sure the string length indicator is in one buffer."
        )
    elif rest is not None:
        yield f"incomplete string data {what}, element {count} is longer than the data"
    elif count > expected:  # Triton stops counting at the first that is too many
        yield f"unexpected number of string elements {expected + 1} {what}, expecting {expected}"
    elif count < expected:
        yield f"expected {expected} string elements {what}, got {count}"


def _count_strings(buffer: memoryview) -> tuple[int, int | None]:
    """Return the number of whole elements in ``buffer``, and the bytes left after the last (None if none)."""
    offsets = strings.find(buffer)
    return len(offsets) - 1, (buffer.nbytes - int(offsets[-1])) or None


def _datatype_name(tensor: Tensor | Undecoded) -> str:
    return tensor.datatype if isinstance(tensor, Undecoded) else data_type(tensor).name


def _quoted(names: Collection[str]) -> str:
    listed = ",".join(f"'{name}'" for name in islice(names, _MAX_NAMES))
    return listed if len(names) <= _MAX_NAMES else f"{listed} and {len(names) - _MAX_NAMES} more"
