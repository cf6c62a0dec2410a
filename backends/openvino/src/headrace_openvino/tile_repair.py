"""A fix for OpenVINO's ``Tile`` on the CPU, which returns memory that it has not written.

It does where the repeats are no constant and three or more axes of a tensor of rank 4 or more are repeated; OpenVINO
2026.4.1 was measured. That memory may hold data of other requests. Repeats of one axis at a time are right, so such
a ``Tile`` is replaced by one for each axis before the graph is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

#: Tensors of a smaller rank are tiled correctly.
_FIRST_WRONG_RANK = 4


def repair_tiles(opened: Any) -> None:
    """Replace every ``Tile`` of ``opened``, an ``openvino.Model``, that may return memory it has not written."""
    for tile in list(_tiles(opened)):
        rank = _rank(tile)
        repeats = tile.input_value(1)
        if rank >= _FIRST_WRONG_RANK and repeats.get_node().get_type_name() != "Constant":
            _replace(tile, repeats, rank)


def _tiles(graph: Any) -> Iterator[Any]:
    """Yield every ``Tile``, those in the bodies of loops and branches included."""
    for operator in graph.get_ordered_ops():
        kind = operator.get_type_name()
        if kind == "Tile":
            yield operator
        elif kind in ("Loop", "TensorIterator"):
            yield from _tiles(operator.get_function())
        elif kind == "If":
            yield from _tiles(operator.get_function(0))
            yield from _tiles(operator.get_function(1))


def _rank(tile: Any) -> int:
    """Return the rank of the result; 0 if the graph does not have it."""
    rank = tile.get_output_partial_shape(0).rank
    repeats = tile.input_value(1).get_partial_shape()
    if rank.is_static:
        return int(rank.get_length())
    return int(repeats[0].get_length()) if repeats.rank.is_static and repeats[0].is_static else 0


def _replace(tile: Any, repeats: Any, rank: int) -> None:
    from openvino import opset13
    from openvino.utils import replace_node

    element = repeats.get_element_type().to_dtype()
    ones = opset13.constant(np.ones(rank, element))
    result = tile.input_value(0)
    for axis in range(rank):
        is_axis = opset13.constant(np.arange(rank) == axis)
        result = opset13.tile(result, opset13.select(is_axis, repeats, ones)).output(0)
    last = result.get_node()
    names = tile.output(0).get_names()
    last.set_friendly_name(tile.get_friendly_name())
    replace_node(tile, last)
    last.output(0).add_names(names)
