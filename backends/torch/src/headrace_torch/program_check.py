"""What a program of torch.export may name, so that it computes and does no more.

Nothing of a program's file is run or evaluated: it is data, of which `headrace_torch.program_graph` makes calls. What
could be called is what this module finds, and it finds operators of PyTorch's own libraries, arithmetic of sizes, and
the few functions that call graphs of the program. ``torch.export.load`` looks a name up by ``getattr`` from ``torch``
on, wherever that leads.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

#: Libraries of operators that are PyTorch's, or are known to touch no files.
LIBRARIES = frozenset(("aten", "prims", "quantized_decomposed", "torchvision"))
#: Operators in them that do more than compute: they touch files, write to the server's output, change what is the whole
#: process's, or believe what they are told about memory. A test looks through all that there are for others.
REFUSED = frozenset(
    (
        "_cufft_clear_plan_cache", "_cufft_set_plan_cache_max_size", "_nested_view_from_buffer",
        "_nested_view_from_buffer_copy", "_print", "_sparse_bsc_tensor_unsafe", "_sparse_bsr_tensor_unsafe",
        "_sparse_compressed_tensor_unsafe", "_sparse_coo_tensor_unsafe", "_sparse_csc_tensor_unsafe",
        "_sparse_csr_tensor_unsafe", "from_file", "save", "set_data",
    )
)  # fmt: skip


def _choose(condition: bool, then: Any, otherwise: Any) -> Any:
    return then if condition else otherwise


#: Arithmetic of sizes while the program runs, as torch.export names it.
_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    **{
        f"_operator.{name}": getattr(operator, name)
        for name in (
            "add", "and_", "eq", "floordiv", "ge", "gt", "le", "lshift", "lt", "mod", "mul", "ne", "neg", "or_", "pos",
            "pow", "rshift", "sub", "truediv",
        )
    },
    "math.trunc": math.trunc,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "torch.sym_float": float,
    "torch.sym_int": int,
    "torch.sym_ite": _choose,
    "torch.sym_max": max,
    "torch.sym_min": min,
    "torch.sym_not": operator.not_,
    "torch.sym_sum": sum,
    "torch._sym_sqrt": math.sqrt,
    "torch.sym_sqrt": math.sqrt,
}  # fmt: skip
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)", re.ASCII)


class Distrusted(ValueError):
    """Says what a program would do that only a trusted one may."""


def find_operator(torch: Any, target: str) -> Any:
    """What a node calls whose ``target`` the file names so: an ``OpOverload``, or a function of numbers.

    Raises `Distrusted` for anything else that there may be, and `ValueError` for an operator that there is not.
    """
    if target in _ARITHMETIC:
        return _ARITHMETIC[target]
    match = _OPERATOR.fullmatch(target)
    if match is None:
        raise Distrusted(f"it calls '{target[:200]}', which is no operator")
    library, name, overload = match.groups()
    if library not in LIBRARIES:
        raise Distrusted(f"it calls '{target}', an operator of the library '{library}'")
    if name in REFUSED:
        raise Distrusted(f"it calls '{target}', which does more than compute")
    found = getattr(getattr(getattr(torch.ops, library), name, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"it calls '{target}', which PyTorch {torch.__version__} does not have")
    return found


# ---------------------------------------------------------------------- sizes

_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
#: As sympy writes them, which PyTorch prints sizes with.
_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "Add": lambda *sizes: sum(sizes),
    "Mul": lambda *sizes: math.prod(sizes),
    "Integer": int,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda size, by: -(-size // by),
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
}
#: How a condition names the size of an input: ``L['x'].size()[0]``.
_INPUT_SIZE = re.compile(r"L(?:\['[^']*'\]|\[\d+\])+\.size\(\)\[\d+\]", re.ASCII)
_Sizes = Mapping[str, int]


class Arithmetic:
    """A size, or a condition of sizes, that the file writes as text. ``symbols`` are the names in it; ``symbol`` is the
    one that it is, or None. ``value`` computes it, where symbols have the sizes that it is given.

    Raises `Distrusted` for what is neither; ``torch.export.load`` evaluates the text, whatever it is.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.symbols: set[str] = set()
        try:
            body = ast.parse(text[:2000], mode="eval").body
            self.value: Callable[[_Sizes], int] = self._compile(body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise Distrusted(f"it has '{text[:200]}' where a size is meant, which is no arithmetic") from None
        is_alone = isinstance(body, ast.Name) or (isinstance(body, ast.Call) and ast.unparse(body.func) == "Symbol")
        self.symbol = next(iter(self.symbols)) if is_alone else None

    def _compile(self, node: ast.expr) -> Callable[[_Sizes], int]:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            number = node.value
            return lambda sizes: number
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            join, left, right = _BINARY[type(node.op)], self._compile(node.left), self._compile(node.right)
            return lambda sizes: join(left(sizes), right(sizes))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            operand = self._compile(node.operand)
            return lambda sizes: -operand(sizes)
        if isinstance(node, ast.Compare):
            return self._compile_comparison(node)
        if isinstance(node, ast.BoolOp):
            judge, parts = all if isinstance(node.op, ast.And) else any, [self._compile(each) for each in node.values]
            return lambda sizes: judge(part(sizes) for part in parts)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            if node.keywords or not node.args:
                raise ValueError
            function, arguments = _FUNCTIONS[node.func.id], [self._compile(each) for each in node.args]
            return lambda sizes: function(*[argument(sizes) for argument in arguments])
        symbol = _symbol(node)
        self.symbols.add(symbol)
        return lambda sizes: sizes[symbol]

    def _compile_comparison(self, node: ast.Compare) -> Callable[[_Sizes], int]:
        terms = [self._compile(each) for each in (node.left, *node.comparators)]
        signs = [_COMPARISONS.get(type(sign)) for sign in node.ops]
        if None in signs:
            raise ValueError
        steps = list(zip(signs, terms, terms[1:], strict=False))
        return lambda sizes: all(sign(left(sizes), right(sizes)) for sign, left, right in steps if sign)


def _symbol(node: ast.expr) -> str:
    """The name in ``s0``, ``Symbol('s0', integer=True)`` or ``L['x'].size()[0]``. Raises `ValueError` for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Symbol":
        name = node.args[0] if len(node.args) == 1 else None  # and what it assumes of the number
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return name.value
    elif isinstance(node, ast.Subscript) and _INPUT_SIZE.fullmatch(text := ast.unparse(node)):
        return text
    raise ValueError
