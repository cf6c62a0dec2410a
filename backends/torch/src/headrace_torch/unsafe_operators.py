"""Operators that return memory that they have not written, or memory outside of a tensor.

Unwritten memory may still hold tensors of other callers. In a model without ``trust``, the results of the operators in
`ZEROED` are zeroed: ordinary models use them, and write the result. The other operators are refused, because zeros
would change results, or would not cover all of the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

#: Operators whose whole result can be zeroed.
ZEROED = frozenset(("empty", "empty_like", "empty_permuted", "new_empty"))
#: Operators whose results are unwritten in part, in gaps between strides, or of types that ``zero_`` does not support.
UNWRITTEN = frozenset(
    (
        "_ctc_loss", "_empty_affine_quantized", "_empty_per_channel_affine_quantized", "_make_dep_token",
        "_nested_compute_contiguous_strides_offsets", "_resize_output", "_resize_output_", "empty_quantized",
        "empty_strided", "new_empty_strided", "resize", "resize_", "resize_as", "resize_as_", "resize_as_sparse",
        "resize_as_sparse_", "set", "set_", "sparse_resize", "sparse_resize_", "sparse_resize_and_clear",
        "sparse_resize_and_clear_",
    )
)  # fmt: skip
#: Operators that do not check that their sizes, strides and indices lie within a tensor.
UNCHECKED = frozenset(
    (
        "_nested_view_from_buffer", "_nested_view_from_buffer_copy", "_reshape_alias", "_reshape_alias_copy",
        "_sparse_bsc_tensor_unsafe", "_sparse_bsr_tensor_unsafe", "_sparse_compressed_tensor_unsafe",
        "_sparse_coo_tensor_unsafe", "_sparse_csc_tensor_unsafe", "_sparse_csr_tensor_unsafe", "set_data",
    )
)  # fmt: skip
#: A call of a method that remains after inlining.
_CALL = "prim::CallMethod"


def why_refused(name: str) -> str:
    """Return why the operator ``name`` needs trust; empty if it does not."""
    if name in UNWRITTEN:
        return "which returns memory that it has not written"
    return "which does not check its arguments about memory" if name in UNCHECKED else ""


def reason_for_trust(functions: Sequence[Any]) -> str:
    """Return why a TorchScript file with these ``functions`` needs trust; empty if it does not.

    ``__setstate__`` has already run when a file is loaded, so its memory cannot be zeroed.
    """
    for function in functions:
        for node in _nodes(function.graph):
            if why := why_refused(_operator(node)):
                return f"it calls '{node.kind()}', {why}"
        if function.name == "__setstate__":
            for node in _nodes(function.inlined_graph):
                if _operator(node) in ZEROED or (node.kind() == _CALL and _is_interface(node)):
                    return f"its '__setstate__' calls '{node.kind()}', which may keep memory that it has not written"
    return ""


def zero(functions: Sequence[Any]) -> None:
    """Insert ``zero_`` after each operator of `ZEROED` in the graphs of TorchScript's ``functions``."""
    for function in functions:
        for node in [each for each in _nodes(function.graph) if _operator(each) in ZEROED]:
            result = node.output()
            zeros = function.graph.create("aten::zero_", [result], 1).insertAfter(node)
            zeros.output().setType(result.type())
            result.replaceAllUsesAfterNodeWith(zeros, zeros.output())


def _operator(node: Any) -> str:
    library, _, name = node.kind().partition("::")
    return name if library in ("aten", "prims") else ""


def _is_interface(node: Any) -> bool:
    return bool(next(node.inputs()).type().kind() == "InterfaceType")


def _nodes(block: Any) -> Iterator[Any]:
    """Yield the nodes of a graph or block, of its inner blocks, and of the graphs in attributes of nodes."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
        for name in node.attributeNames():
            if node.kindOf(name) == "g":
                yield from _nodes(node.g(name))
