"""Why a request does not fit a signature, in Triton's order and words.

Source: docs/spec/behaviours.md section 3.2. Called only for requests that `Signature.check` refused.

Where several inputs are wrong, Triton names the one that was sent last: it walks a hash table, which has the newest
entry in front. (Names that share a bucket, and more than 13 inputs, come in another order there. That is chance, and
not followed.) Requested outputs it has in a sorted set.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice
from math import prod
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError, InvalidArgument
from headrace.messages import dtypes, strings
from headrace.messages.request import InferRequest, Undecoded
from headrace.messages.tensor import BytesTensor, Tensor, data_type

if TYPE_CHECKING:
    from headrace.models.signature import Signature

#: Names that a message lists; who sends more gets their number.
_MAX_NAMES = 100
_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def explain(signature: Signature, request: InferRequest) -> HeadraceError:
    """The first rule that ``request`` breaks, as an error to raise."""
    rules = (_outputs, _count, _unknown, _batch, _inputs)
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
    for name in sorted(seen):
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
    shape, expected = tensor.shape, signature.wire_shape(signature.inputs[name])
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
    found, left = _count_strings(tensor.buffer)
    what = f"for inference input '{name}' for model '{signature.name}'"
    expected = prod(tensor.shape)
    if left is not None and left < 4:
        yield (
            f"incomplete string length indicator {what}, expecting 4 bytes but only {left} bytes available. Please "
            "make sure the string length indicator is in one buffer."
        )
    elif left is not None:
        yield f"incomplete string data {what}, element {found} is longer than the data"
    elif found > expected:
        yield f"unexpected number of string elements {found} {what}, expecting {expected}"
    elif found < expected:
        yield f"expected {expected} string elements {what}, got {found}"


def _count_strings(buffer: memoryview) -> tuple[int, int | None]:
    """Whole elements in ``buffer``, and the bytes left after the last of them (None if none)."""
    offsets = strings.find(buffer)
    return len(offsets) - 1, (buffer.nbytes - int(offsets[-1])) or None


def _datatype_name(tensor: Tensor | Undecoded) -> str:
    return tensor.datatype if isinstance(tensor, Undecoded) else data_type(tensor).name


def _quoted(names: Collection[str]) -> str:
    listed = ",".join(f"'{name}'" for name in islice(names, _MAX_NAMES))
    return listed if len(names) <= _MAX_NAMES else f"{listed} and {len(names) - _MAX_NAMES} more"
