"""The side effects of a TorchScript module, read from its graph.

Needed to share a module, to decide about copies of its inputs, and to execute it without a request. A module that the
engine cannot analyse is assumed to have all effects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: The limit that TorchScript gives to a loop that ends by its condition alone.
_NO_LIMIT = 2**63 - 1
#: A loop of at most so many repetitions is short.
_SHORT_LOOP = 10_000
#: Arguments of operators that can drop out at random, and the values that switch this off.
NOTHING_DROPPED: Mapping[str, object] = {"train": False, "dropout_p": 0.0}
#: In the text of a schema: ``float dropout_p=0.``, ``bool train``.
_ARGUMENTS = re.compile(r" (\w+)[,=)]")
#: Calls that remain after inlining: their functions are unknown until they are executed.
_CALLS = frozenset(("prim::CallMethod", "prim::CallFunction"))


def drops_nothing(arguments: Mapping[str, object]) -> bool:
    """True if an operator that can draw random numbers does not with these ``arguments``."""
    return any(name in arguments and arguments[name] == value for name, value in NOTHING_DROPPED.items())


@dataclass(frozen=True, slots=True)
class ScriptEffects:
    """The effects of a module.

    - ``writes``: it writes to its inputs. ``changes``: it writes to its attributes, which the next call reads.
    - ``is_random``: it draws random numbers.
    - ``loops``: it repeats something until a condition holds, which may be never.
    - ``repeats``: the number of repetitions of a loop is large, unlimited, or depends on the inputs.
    """

    writes: bool = True
    changes: bool = True
    is_random: bool = True
    loops: bool = True
    repeats: bool = True


def effects_of(torch: Any, module: Any) -> ScriptEffects:
    """Return the effects of ``forward`` of ``module``, which is in evaluation mode."""
    try:
        # Freezing removes what it does in training only, such as counting batches. It does not copy weights.
        frozen = torch._C._freeze_module(module._c, [], True, True)
        graph = frozen._get_method("forward").graph
        aliases = graph.alias_db()
        writes = any(map(aliases.has_writers, list(graph.inputs())[1:]))
        changes = is_random = loops = repeats = False
        for node in _nodes(graph):
            kind = node.kind()
            is_unknown = kind in _CALLS
            writes |= is_unknown
            changes |= is_unknown or kind == "prim::SetAttr" or _writes_attribute(node, aliases)
            is_random |= is_unknown or _is_random(node)
            times = next(node.inputs()).toIValue() if kind == "prim::Loop" else 0
            loops |= is_unknown or times == _NO_LIMIT
            repeats |= is_unknown or times is None or times > _SHORT_LOOP
    except Exception:  # a module that the engine cannot analyse
        return ScriptEffects()
    return ScriptEffects(writes, changes, is_random, loops, repeats)


def _writes_attribute(node: Any, aliases: Any) -> bool:
    return node.kind() == "prim::GetAttr" and any(map(aliases.has_writers, node.outputs()))


def _is_random(node: Any) -> bool:
    if not node.isNondeterministic():
        return False
    names = NOTHING_DROPPED.keys() & _ARGUMENTS.findall(node.schema())
    return not drops_nothing({name: node.namedInput(name).toIValue() for name in names})


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
