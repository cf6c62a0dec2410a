"""Computes sizes, and conditions of sizes, that a program of torch.export has as text, without ``eval``."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

from headrace_torch.program_check import TrustRequired

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
#: The functions of sympy, with which PyTorch writes sizes.
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
#: The size of an input in a condition: ``L['x'].size()[0]``.
_INPUT_SIZE = re.compile(r"L(?:\['[^']*'\]|\[\d+\])+\.size\(\)\[\d+\]", re.ASCII)
_Sizes = Mapping[str, int]


class Arithmetic:
    """A size, or a condition of sizes, in the text of a file. ``value(sizes)`` computes it for the sizes of symbols.

    ``symbols`` are the names in it. ``symbol`` is the name if the text is just that, else None. Raises `TrustRequired`
    for any other text, which ``torch.export.load`` would evaluate.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.symbols: set[str] = set()
        try:
            body = ast.parse(text[:2000], mode="eval").body
            self.value: Callable[[_Sizes], int] = self._compile(body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise TrustRequired(f"it has '{text[:200]}' where a size is meant, which is no arithmetic") from None
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
    """Return the name in ``s0``, ``Symbol('s0', integer=True)`` or ``L['x'].size()[0]``. Raises `ValueError` for
    others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Symbol":
        name = node.args[0] if len(node.args) == 1 else None  # keywords are assumptions about the number
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return name.value
    elif isinstance(node, ast.Subscript) and _INPUT_SIZE.fullmatch(text := ast.unparse(node)):
        return text
    raise ValueError
