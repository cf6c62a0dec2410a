"""Why a request does not fit a signature, in Triton's order and words.

Source: behaviours.md section 3.2. Called only for requests that `Signature.check` refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from math import prod
from typing import TYPE_CHECKING

from penstock.errors import InvalidArgument, PenstockError
from penstock.messages import dtypes, strings
from penstock.messages.request import InferRequest, Undecoded
from penstock.messages.tensor import BytesTensor, Tensor, data_type

if TYPE_CHECKING:
    from penstock.models.signature import Signature

#: Names that a message lists; who sends more gets their number.
_MAX_NAMES = 100
_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def explain(signature: Signature, request: InferRequest) -> PenstockError:
    """The first rule that ``request`` breaks, as an error to raise."""
    rules = (_outputs, _count, _unknown, _batch, _datatypes, _shapes, _sizes, _strings)
    reasons = chain.from_iterable(rule(signature, request) for rule in rules)
    return InvalidArgument(next(reasons, f"{request.log_id}request does not fit model '{signature.name}'"))


def bracket(shape: Iterable[int]) -> str:
    """``[2,3]``: a shape as Triton prints it."""
    return f"[{','.join(map(str, shape))}]"


def _outputs(signature: Signature, request: InferRequest) -> Iterator[str]:
    seen = set()
    for name in request.outputs:
        if name in seen:
            yield f"{request.log_id}output '{name}' already exists in request"
        seen.add(name)
    for name in request.outputs:
        if name not in signature.outputs:
            yield f"unexpected inference output '{name}' for model '{signature.name}'"


def _count(signature: Signature, request: InferRequest) -> Iterator[str]:
    total, required, given = len(signature.inputs), signature.required, len(request.inputs)
    missing = [n for n, spec in signature.inputs.items() if not spec.optional and n not in request.inputs]
    if required <= given <= total and not missing:
        return
    if required < total:
        expected = f"expected number of inputs between {required} and {total} but got {given} inputs"
    elif given != total:
        expected = f"expected {total} inputs but got {given} inputs"
    else:
        return  # the right number with a wrong name: the next rule names it
    yield (
        f"{request.log_id}{expected} for model '{signature.name}'. Got input(s) [{_quoted(request.inputs)}], but "
        f"missing required input(s) [{_quoted(missing)}]. Please provide all required input(s)."
    )


def _unknown(signature: Signature, request: InferRequest) -> Iterator[str]:
    for name in request.inputs:
        if name not in signature.inputs:
            yield f"unexpected inference input '{name}' for model '{signature.name}'"


def _batch(signature: Signature, request: InferRequest) -> Iterator[str]:
    if not signature.batched:
        return
    rows = None
    for name, tensor in request.inputs.items():
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


def _datatypes(signature: Signature, request: InferRequest) -> Iterator[str]:
    for name, tensor in request.inputs.items():
        got, expected = _datatype_name(tensor), signature.inputs[name].datatype.name
        if got != expected:
            yield (
                f"{request.log_id}inference input '{name}' data-type is '{got}', but model '{signature.name}' "
                f"expects '{expected}'"
            )


def _shapes(signature: Signature, request: InferRequest) -> Iterator[str]:
    for name, tensor in request.inputs.items():
        shape, expected = tensor.shape, signature.wire_shape(signature.inputs[name])
        if any(dim < 0 for dim in shape):
            yield (
                f"{request.log_id}All input dimensions should be specified for input '{name}' for model "
                f"'{signature.name}', got {bracket(shape)}"
            )
        if len(shape) == len(expected) and all(want in (-1, got) for want, got in zip(expected, shape, strict=True)):
            continue
        yield (
            f"{request.log_id}unexpected shape for input '{name}' for model '{signature.name}'. Expected "
            f"{bracket(expected)}, got {bracket(shape)}. {_BATCH_NOTE if signature.batched else ''}"
        )


def _sizes(signature: Signature, request: InferRequest) -> Iterator[str]:
    for name, tensor in request.inputs.items():
        spec = signature.inputs[name]
        if isinstance(tensor, Undecoded) and spec.datatype is not dtypes.BYTES:
            yield (
                f"{request.log_id}input byte size mismatch for input '{name}' for model '{signature.name}'. Expected "
                f"{tensor.element_count * spec.datatype.itemsize}, got {tensor.buffer.nbytes}"
            )


def _strings(signature: Signature, request: InferRequest) -> Iterator[str]:
    for name, tensor in request.inputs.items():
        if not isinstance(tensor, BytesTensor | Undecoded):
            continue
        found, left = _count_strings(tensor.buffer)
        what = f"for inference input '{name}' for model '{signature.name}'"
        expected = prod(tensor.shape)
        if left is not None and left < 4:
            yield (
                f"{request.log_id}incomplete string length indicator {what}, expecting 4 bytes but only {left} bytes "
                "available. Please make sure the string length indicator is in one buffer."
            )
        elif left is not None:
            yield f"{request.log_id}incomplete string data {what}, element {found} is longer than the data"
        elif found > expected:
            yield f"{request.log_id}unexpected number of string elements {found} {what}, expecting {expected}"
        elif found < expected:
            yield f"{request.log_id}expected {expected} string elements {what}, got {found}"


def _count_strings(buffer: memoryview) -> tuple[int, int | None]:
    """Whole elements in ``buffer``, and the bytes left after the last of them (None if none)."""
    offsets = strings.find(buffer)
    return len(offsets) - 1, (buffer.nbytes - int(offsets[-1])) or None


def _datatype_name(tensor: Tensor | Undecoded) -> str:
    return tensor.datatype if isinstance(tensor, Undecoded) else data_type(tensor).name


def _quoted(names: Collection[str]) -> str:
    listed = ",".join(f"'{name}'" for name in islice(names, _MAX_NAMES))
    return listed if len(names) <= _MAX_NAMES else f"{listed} and {len(names) - _MAX_NAMES} more"
