"""The parameter ``padding`` of a model: inputs and batches are padded to one of a few sizes.

Its value is JSON. Triton does not have it::

    {"pad": [{"input": "tokens", "axis": 0, "buckets": [16, 32, 64], "value": 0,
              "length": {"name": "tokens_length", "data_type": "TYPE_INT32"},
              "mask": {"name": "tokens_mask", "data_type": "TYPE_INT64"}}],
     "unpad": [{"output": "scores", "axis": 0, "input": "tokens", "input_axis": 0}],
     "pad_batch_to": [1, 4, 8]}

Axes are numbered as in the config's ``dims``, without the batch axis. Child processes import this module, so it does
not import protobuf.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.errors import ConfigError, InvalidArgument
from headrace.messages import dtypes
from headrace.messages.dtypes import DataType

#: The key of the parameter.
PADDING = "padding"
#: The data types of lengths and masks.
_MADE_TYPES = ("TYPE_BOOL", "TYPE_INT32", "TYPE_INT64", "TYPE_FP32")
#: A bucket, the size to which an axis is padded, must be smaller than this.
_MOST = 1 << 31


@dataclass(frozen=True, slots=True)
class MadeInput:
    """An input that the server generates; callers do not send it."""

    name: str
    datatype: DataType


@dataclass(frozen=True, slots=True)
class AxisPad:
    """Pads axis ``axis`` of input ``name`` with ``value``, a string for an input of strings, to the smallest of
    ``buckets`` that is large enough.

    The model gets the original sizes as ``length`` [rows], and ``mask`` [rows, bucket]: 1 for original elements, 0 for
    padding. Each is optional.
    """

    name: str
    axis: int
    buckets: tuple[int, ...]
    value: float | str
    length: MadeInput | None
    mask: MadeInput | None

    def bucket(self, size: int) -> int:
        """Return the padded size for ``size``. Raises `InvalidArgument` if no bucket is large enough."""
        index = bisect_left(self.buckets, size)
        if index == len(self.buckets):
            raise InvalidArgument(
                f"input '{self.name}' has size {size} on axis {self.axis}, but the largest bucket that it can be "
                f"padded to is {self.buckets[-1]} of {list(self.buckets)}"
            )
        return self.buckets[index]


@dataclass(frozen=True, slots=True)
class AxisCut:
    """Cuts axis ``axis`` of an output, which has the padded size of ``pad``, to the original size.

    An output of another size is an error if ``must``, because the config lists the cut; else it is not cut.
    """

    axis: int
    pad: AxisPad
    must: bool


@dataclass(frozen=True, slots=True)
class PaddingRules:
    """The parsed parameter. ``row_buckets`` is empty if batches are not padded."""

    pads: tuple[AxisPad, ...]
    cuts: Mapping[str, tuple[AxisCut, ...]]
    row_buckets: tuple[int, ...]
    batched: bool
    by_input: Mapping[str, tuple[AxisPad, ...]] = field(init=False)

    def __post_init__(self) -> None:
        names = dict.fromkeys(pad.name for pad in self.pads)
        by_input = {name: tuple(pad for pad in self.pads if pad.name == name) for name in names}
        object.__setattr__(self, "by_input", by_input)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> PaddingRules | None:
        """Return the rules of a config in the JSON of the ``/config`` endpoint; None if it lacks the parameter.

        Raises `ConfigError`.
        """
        parameter = config.get("parameters", {}).get(PADDING)
        if parameter is None:
            return None
        try:
            return _Reader(config).read(parameter.get("string_value", ""))
        except _Wrong as error:
            raise ConfigError(
                f"model '{config.get('name', '')}': parameter '{PADDING}': {error}", field=f"parameters['{PADDING}']"
            ) from None

    @property
    def made(self) -> list[MadeInput]:
        return [made for pad in self.pads for made in (pad.length, pad.mask) if made is not None]

    def rows(self, rows: int) -> int:
        """Return the number of rows that are executed for requests with ``rows`` rows together."""
        buckets = self.row_buckets
        return buckets[bisect_left(buckets, rows)] if buckets and rows <= buckets[-1] else rows

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the padded shape of input ``name`` for ``shape``, with the same rows. Raises as `AxisPad.bucket`."""
        filled = list(shape)
        for pad in self.by_input.get(name, ()):
            axis = pad.axis + self.batched
            filled[axis] = pad.bucket(shape[axis])
        return tuple(filled)

    def key(self, inputs: Mapping[str, Any]) -> tuple[object, ...]:
        """Return the key that all requests of a batch must share. Raises as `AxisPad.bucket`."""
        return tuple([(name, self.shape(name, tensor.shape)[1:]) for name, tensor in sorted(inputs.items())])


class _Wrong(Exception):
    """The parameter is invalid. The text is the reason."""


class _Reader:
    """Parses the parameter of a model with this ``config``."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._inputs = {io["name"]: io for io in config.get("input", ())}
        self._outputs = {io["name"]: io for io in config.get("output", ())}
        self._most_rows = config.get("max_batch_size", 0)
        self._is_ragged = bool(config.get("batch_input") or config.get("batch_output")) or any(
            io.get("allow_ragged_batch") for io in self._inputs.values()
        )
        self._made: set[str] = set()

    def read(self, text: str) -> PaddingRules:
        if self._is_ragged:
            raise _Wrong("a model with ragged batches cannot have it")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _Wrong(f"expected JSON: {error}") from None
        fields = _object(value, "the parameter", ("pad", "unpad", "pad_batch_to"))
        pads = tuple(self._pad(each, f"pad[{n}]") for n, each in enumerate(_array(fields.get("pad", []), "pad")))
        values: dict[str, float | str] = {}
        for number, pad in enumerate(pads):
            if any((other.name, other.axis) == (pad.name, pad.axis) for other in pads[:number]):
                raise _Wrong(f"axis {pad.axis} of input '{pad.name}' is padded twice")
            if values.setdefault(pad.name, pad.value) != pad.value:
                raise _Wrong(f"input '{pad.name}' is padded with {values[pad.name]!r} and with {pad.value!r}")
        rows = self._row_buckets(fields["pad_batch_to"]) if "pad_batch_to" in fields else ()
        if not pads and not rows:
            raise _Wrong("it has neither 'pad' nor 'pad_batch_to'")
        cuts = dict(self._declared(fields["unpad"], pads) if "unpad" in fields else self._derived(pads))
        return PaddingRules(pads, cuts, rows, self._most_rows > 0)

    def _pad(self, content: Any, where: str) -> AxisPad:
        fields = _object(content, where, ("input", "axis", "buckets", "value", "length", "mask"))
        name = _text(fields, "input", where)
        io = _named(self._inputs, name, "input", where)
        if io.get("reshape"):
            raise _Wrong(f"{where}: input '{name}' has a reshape, and cannot be padded")
        axis = _variable_axis(io, fields.get("axis"), f"input '{name}'", where)
        buckets = _sizes(fields.get("buckets"), f"{where}.buckets")
        nothing = "" if io["data_type"] == "TYPE_STRING" else 0
        value = _value(fields.get("value", nothing), dtypes.BY_CONFIG_NAME[io["data_type"]], where)
        return AxisPad(
            name, axis, buckets, value, self._make(fields, "length", where), self._make(fields, "mask", where)
        )

    def _make(self, fields: Mapping[str, Any], what: str, where: str) -> MadeInput | None:
        if what not in fields:
            return None
        where = f"{where}.{what}"
        made = _object(fields[what], where, ("name", "data_type"))
        name, datatype = _text(made, "name", where), _text(made, "data_type", where)
        if datatype not in _MADE_TYPES:
            raise _Wrong(f"{where}: data_type is '{datatype}', expected one of {', '.join(_MADE_TYPES)}")
        if name in self._inputs or name in self._made:
            raise _Wrong(f"{where}: '{name}' is an input already; the server makes this one itself")
        self._made.add(name)
        return MadeInput(name, dtypes.BY_CONFIG_NAME[datatype])

    def _row_buckets(self, value: Any) -> tuple[int, ...]:
        buckets = _sizes(value, "pad_batch_to")
        if buckets[-1] != self._most_rows:
            raise _Wrong(f"pad_batch_to ends with {buckets[-1]}, expected max_batch_size, which is {self._most_rows}")
        return buckets

    def _declared(self, value: Any, pads: Sequence[AxisPad]) -> Iterator[tuple[str, tuple[AxisCut, ...]]]:
        cuts_of: dict[str, list[AxisCut]] = {}
        for number, each in enumerate(_array(value, "unpad")):
            where = f"unpad[{number}]"
            fields = _object(each, where, ("output", "axis", "input", "input_axis"))
            name = _text(fields, "output", where)
            io = _named(self._outputs, name, "output", where)
            if io.get("reshape"):
                raise _Wrong(f"{where}: output '{name}' has a reshape, and cannot be cut")
            axis = _variable_axis(io, fields.get("axis"), f"output '{name}'", where)
            source, source_axis = _text(fields, "input", where), fields.get("input_axis", axis)
            pad = next((pad for pad in pads if (pad.name, pad.axis) == (source, source_axis)), None)
            if pad is None:
                raise _Wrong(f"{where}: axis {source_axis!r} of input '{source}' is not padded")
            cuts_of.setdefault(name, []).append(AxisCut(axis, pad, True))
        for name, cuts in cuts_of.items():
            yield name, tuple(cuts)

    def _derived(self, pads: Sequence[AxisPad]) -> Iterator[tuple[str, tuple[AxisCut, ...]]]:
        """Yield the cuts of a config without ``unpad``: each variable axis of an output is cut by the first pad of an
        axis with the same number."""
        by_axis = {pad.axis: pad for pad in reversed(pads)}
        for name, io in self._outputs.items():
            axes = [] if io.get("reshape") else [axis for axis, dim in enumerate(io["dims"]) if int(dim) == -1]
            cuts = tuple(AxisCut(axis, by_axis[axis], False) for axis in axes if axis in by_axis)
            if cuts:
                yield name, cuts


def _object(value: Any, where: str, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{where} is {_shown(value)}, expected an object")
    for key in value:
        if key not in known:
            raise _Wrong(f"{where} has an unknown key '{_shown(key)}'; known: {', '.join(known)}")
    return value


def _array(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Wrong(f"{where} is {_shown(value)}, expected an array")
    return value


def _text(fields: Mapping[str, Any], key: str, where: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not value:
        raise _Wrong(f"{where}.{key} is {_shown(value)}, expected a name")
    return value


def _named(tensors: Mapping[str, Any], name: str, direction: str, where: str) -> Mapping[str, Any]:
    tensor: Mapping[str, Any] | None = tensors.get(name)
    if tensor is None:
        raise _Wrong(f"{where} names {direction} '{_shown(name)}', the model has {', '.join(tensors) or 'none'}")
    return tensor


def _variable_axis(io: Mapping[str, Any], axis: Any, what: str, where: str) -> int:
    dims = [int(dim) for dim in io["dims"]]
    if type(axis) is not int or not 0 <= axis < len(dims):
        raise _Wrong(f"{where}.axis is {_shown(axis)}, expected an axis of {what}: 0 to {len(dims) - 1}")
    if dims[axis] != -1:
        raise _Wrong(
            f"{where}: axis {axis} of {what} is {dims[axis]} in the config, and only a variable one can be padded"
        )
    return axis


def _sizes(value: Any, where: str) -> tuple[int, ...]:
    sizes = _array(value, where)
    if not sizes or any(type(size) is not int or not 0 < size < _MOST for size in sizes) or sizes != sorted(set(sizes)):
        raise _Wrong(f"{where} is {_shown(value)}, expected whole numbers from 1 on, ascending")
    return tuple(sizes)


def _value(value: Any, datatype: DataType, where: str) -> float | str:
    if datatype is dtypes.BY_CONFIG_NAME["TYPE_STRING"]:
        if isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value):
            return value
    elif type(value) in (int, float, bool):
        numpy = datatype.numpy
        try:
            exact = bool(np.isfinite(value)) and float(np.array(value).astype(numpy)) == float(value)
        except (OverflowError, ValueError):
            exact = False
        if exact or numpy.kind not in "iub":
            return value  # type: ignore[no-any-return]
    raise _Wrong(f"{where}.value is {_shown(value)}, expected a value of {datatype.config_name}")


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 and text.isprintable() else f"{text[:60].encode('unicode_escape').decode()}..."
