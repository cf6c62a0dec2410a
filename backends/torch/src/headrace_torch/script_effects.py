"""The side effects of a TorchScript module, read from its graph.

Needed to share a module, to decide about copies of its inputs, and to execute it without a request. A module that the
engine cannot analyse is assumed to have all effects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: How often a loop is repeated that ends by its condition alone.
_FOR_EVER = 2**63 - 1
#: As often as that in no time.
_SOON = 10_000
#: Arguments of operators that could drop out at random, and the values with which they do not.
NOTHING_DROPPED: Mapping[str, object] = {"train": False, "dropout_p": 0.0}
#: In the text of a schema: ``float dropout_p=0.``, ``bool train``.
_ARGUMENTS = re.compile(r" (\w+)[,=)]")
#: A call that remains after inlining is not known before it is executed.
_CALLS = frozenset(("prim::CallMethod", "prim::CallFunction"))


def drops_nothing(given: Mapping[str, object]) -> bool:
    """True if an operator that can draw random numbers does not, with these arguments."""
    return any(name in given and given[name] == value for name, value in NOTHING_DROPPED.items())


@dataclass(frozen=True, slots=True)
class ScriptEffects:
    """``writes`` to its inputs; ``changes`` its own attributes, so that the next call finds them otherwise;
    ``is_random``; ``loops`` until a condition holds, which may be never; ``repeats`` something as often as its inputs
    say, or often, or for ever."""

    writes: bool = True
    changes: bool = True
    is_random: bool = True
    loops: bool = True
    repeats: bool = True


def effects_of(torch: Any, module: Any) -> ScriptEffects:
    """Return the effects of ``forward`` of ``module``, which is in evaluation mode."""
    try:
        # Freezing removes its actions in training, such as counting batches. Weights stay where they are.
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
            loops |= is_unknown or times == _FOR_EVER
            repeats |= is_unknown or times is None or times > _SOON
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
