"""Resolves the names of functions in a program of torch.export, and refuses functions that do more than compute.

A program's file is data: none of it is run or evaluated. `headrace_torch.program_graph` makes calls of it, and only of
functions that this module returns: operators of PyTorch's own libraries, arithmetic of sizes, and the few functions
that call graphs of the program. ``torch.export.load`` resolves any name by ``getattr`` from ``torch``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace_torch.unsafe_operators import why_refused

#: Libraries of PyTorch's own operators, and others that access no files.
LIBRARIES = frozenset(("aten", "prims", "quantized_decomposed", "torchvision"))
#: Operators in them that access files, write to the server's output, or change the whole process. A test searches all
#: operators for others. `headrace_torch.unsafe_operators` has more.
REFUSED = frozenset(("_cufft_clear_plan_cache", "_cufft_set_plan_cache_max_size", "_print", "from_file", "save"))


def _choose(condition: bool, then: Any, otherwise: Any) -> Any:
    return then if condition else otherwise


#: The limit of a size. Python's integers are unlimited, and arithmetic of large ones holds the interpreter's lock.
_MOST_BITS = 64


def _bounded(number: Any) -> Any:
    if type(number) is int and number.bit_length() > _MOST_BITS:
        raise OverflowError(f"a size has more than {_MOST_BITS} bits")
    return number


def _multiply(left: Any, right: Any) -> Any:
    return _bounded(left * right)


def _shift(number: Any, bits: Any) -> Any:
    return _bounded(number << min(bits, _MOST_BITS + 1))


def _power(base: Any, exponent: Any) -> Any:
    if type(base) is type(exponent) is int and abs(base) > 1:
        exponent = min(exponent, _MOST_BITS + 1)
    return _bounded(base**exponent)


#: Arithmetic of sizes while the program runs, as torch.export names it.
_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    **{
        f"_operator.{name}": getattr(operator, name)
        for name in (
            "add", "and_", "eq", "floordiv", "ge", "gt", "le", "lt", "mod", "ne", "neg", "or_", "pos", "rshift", "sub",
            "truediv",
        )
    },
    "_operator.lshift": _shift,
    "_operator.mul": _multiply,
    "_operator.pow": _power,
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


class TrustRequired(ValueError):
    """The program would do something that needs the parameter ``trust``."""


def find_operator(torch: Any, target: str) -> Any:
    """Return the function of a node with this ``target``: an ``OpOverload``, or a function of numbers.

    Raises `TrustRequired` for another existing function, and `ValueError` for an unknown operator.
    """
    if target in _ARITHMETIC:
        return _ARITHMETIC[target]
    match = _OPERATOR.fullmatch(target)
    if match is None:
        raise TrustRequired(f"it calls '{target[:200]}', which is no operator")
    library, name, overload = match.groups()
    if library not in LIBRARIES:
        raise TrustRequired(f"it calls '{target}', an operator of the library '{library}'")
    if name in REFUSED:
        raise TrustRequired(f"it calls '{target}', which does more than compute")
    if why := why_refused(name):
        raise TrustRequired(f"it calls '{target}', {why}")
    found = getattr(getattr(getattr(torch.ops, library), name, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"it calls '{target}', which PyTorch {torch.__version__} does not have")
    return found


# ---------------------------------------------------------------------- graphs within the graph


def _cond(condition: Any, then: Any, otherwise: Any, operands: Sequence[Any]) -> Any:
    return (then if condition else otherwise)(*operands)


def _while_loop(condition: Any, body: Any, carried: Sequence[Any], others: Sequence[Any]) -> Any:
    while condition(*carried, *others):
        carried = body(*carried, *others)
    return tuple(carried)


def _map(function: Any, arrays: Sequence[Any], others: Sequence[Any]) -> Any:
    import torch

    results = [function(*elements, *others) for elements in zip(*arrays, strict=True)]
    return tuple(torch.stack(column) for column in zip(*results, strict=True))


def _with_gradients(enabled: bool, function: Any, *arguments: Any) -> Any:
    import torch

    with torch.set_grad_enabled(enabled):
        return function(*arguments)


def _with_autocast(kind: str, dtype: Any, enabled: bool, cached: bool | None, function: Any, *arguments: Any) -> Any:
    import torch

    with torch.autocast(kind, dtype, enabled, cached):
        return function(*arguments)


#: The functions that run graphs of the program, by PyTorch's names. Each computes the same as PyTorch's function.
HIGHER_ORDER: Mapping[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "map_impl": _map,
    "wrap_with_set_grad_enabled": _with_gradients,
    "wrap_with_autocast": _with_autocast,
}
