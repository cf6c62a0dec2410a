"""Finds the side effects of a graph: walks from the requested tensors, through the functions that it calls.

The rules are in `headrace_tf.operator_rules`. Operators that nothing requests never run, and are not checked: every
SavedModel has the operators that saved it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from headrace import LoadError, one_line
from headrace_tf.model_graph import ModelGraph, needed_nodes, node_of
from headrace_tf.operator_rules import FILE_INPUTS, why_refused

#: An attribute by which the engine may put another function in the place of one that is called.
_INTERCHANGEABLE = "api_implements"
_PASSES_ON = ("Identity", "PlaceholderWithDefault")
#: Operators that pass their inputs to a function as arguments, and the number of inputs before the arguments. Without
#: loops: from the second time on, the function gets its own results.
_CALLS: Mapping[str, int] = {
    "PartitionedCall": 0,
    "StatefulPartitionedCall": 0,
    "If": 1,
    "StatelessIf": 1,
    "Case": 1,
    "StatelessCase": 1,
}


def check_operators(
    model: str, graph: ModelGraph, own: Mapping[str, bool], libraries: Set[str] = frozenset()
) -> tuple[str, ...]:
    """Raise `LoadError` for a refused operator, with the file, the operator and the reason.

    ``own`` maps TensorFlow's operators to True if they have state. Operators of the model's ``libraries`` may run, too.
    Returns the tensors that name the files read by ``graph.init_ops``: the caller must set these names.
    """
    walk = _Walk(model, graph, own, libraries)
    walk.check(graph.outputs.values(), may_read=False)
    if graph.checkpoint is not None:
        for tensor in walk.check([graph.checkpoint.restore_op], may_read=True):
            if not walk.is_passed_on(_tensor(graph.checkpoint.filename_tensor), tensor):
                walk.refuse("RestoreV2", tensor, "it reads files other than the model's variables")
    return tuple(walk.check(graph.init_ops, may_read=True))


class _Walk:
    def __init__(self, model: str, graph: ModelGraph, own: Mapping[str, bool], libraries: Set[str]) -> None:
        self._model, self._path = model, graph.path
        self._graph_def, self._own, self._libraries = graph.graph_def, own, libraries
        self._nodes = {node.name: node for node in graph.graph_def.node}
        self._functions = {each.signature.name: each for each in graph.graph_def.library.function}
        self._gradients = {each.function_name: each.gradient_func for each in graph.graph_def.library.gradient}
        self._interchangeable = [name for name, each in self._functions.items() if _INTERCHANGEABLE in each.attr]
        self._checked: dict[tuple[str, bool], list[int]] = {}
        self._entered = set[str]()
        for name in self._functions.keys() & own.keys():
            self.refuse(name, name, "it is a function by the name of an operator")

    def check(self, roots: Iterable[str], may_read: bool) -> list[str]:
        """Check all nodes that ``roots``, nodes or tensors, need. Return the tensors that name files to read.

        Operators that read files are refused unless ``may_read``.
        """
        names: list[str] = []
        for node in needed_nodes(self._graph_def, roots):
            names += [node.input[index] for index in self._file_inputs(node, may_read)]
        return names

    def is_passed_on(self, origin: str, tensor: str) -> bool:
        """True if ``tensor`` has the value of ``origin``, without any computation."""
        seen = set[str]()
        while tensor not in seen and _tensor(tensor) != origin:
            seen.add(tensor)
            node = self._nodes.get(node_of(tensor))
            if node is None or node.op not in _PASSES_ON or not node.input:
                return False
            tensor = node.input[0]
        return _tensor(tensor) == origin

    def refuse(self, operator: str, node: str, reason: str) -> None:
        raise LoadError(
            f"unable to load model '{self._model}': '{self._path}' has the operator '{one_line(operator)}' (node "
            f"'{one_line(node)}'), and {reason}. A graph from somebody else must not do that; if you trust this one, "
            'say so in its config: parameters { key: "trust" value { string_value: "true" } }'
        )

    def _refuse_unknown(self, node: Any) -> None:
        raise LoadError(
            f"unable to load model '{self._model}': '{self._path}' has the operator '{one_line(node.op)}' (node "
            f"'{one_line(node.name)}'), which this TensorFlow does not have. If a library brings it, name that in the "
            'config: model_operations { op_library_filename: "..." }'
        )

    def _file_inputs(self, node: Any, may_read: bool) -> list[int]:
        """Return the inputs of ``node`` that name files read by it or by a function that it calls."""
        if node.op in FILE_INPUTS and may_read:
            return [FILE_INPUTS[node.op]]
        if node.op not in self._functions and node.op not in self._libraries:
            if node.op not in self._own:
                self._refuse_unknown(node)
            if reason := why_refused(node, self._own[node.op]):
                self.refuse(node.op, node.name, reason)
        called = _called(node, self._functions)
        read = {index for name in called for index in self._file_arguments(name, may_read)}
        if not read:
            return []
        if node.op not in _CALLS and node.op not in self._functions:
            self.refuse(node.op, node.name, "it reads files by a function that it may call more than once")
        skipped = _CALLS.get(node.op, 0)
        return sorted(index + skipped for index in read)

    def _file_arguments(self, name: str, may_read: bool) -> list[int]:
        """Return the arguments of the function ``name`` that name files to read. Each function is checked once."""
        known = self._checked
        if (name, may_read) in known:
            if name in self._entered and may_read:
                self.refuse(name, name, "it calls itself, so that the files that it reads are unknown")
            return known[name, may_read]
        known[name, may_read] = []
        self._entered.add(name)
        function = self._functions[name]
        others = [*self._interchangeable, *([self._gradients[name]] if name in self._gradients else [])]
        for other in others:
            if other in self._functions and other != name and self._file_arguments(other, may_read):
                self.refuse(other, name, "it reads files by a function that stands in for another")
        arguments = {each.name: index for index, each in enumerate(function.signature.input_arg)}
        inside = {each.name: each for each in function.node_def}
        found = set[int]()
        for node in function.node_def:
            for index in self._file_inputs(node, may_read):
                source = _origin(node.input[index], arguments, inside)
                if source not in arguments:
                    self.refuse(node.op, f"{name}/{node.name}", "it reads files that are not the model's own")
                found.add(arguments[source])
        known[name, may_read] = sorted(found)
        self._entered.discard(name)
        return known[name, may_read]


def _origin(source: str, arguments: Mapping[str, int], inside: Mapping[str, Any]) -> str:
    """Return the origin of ``source`` in a function with these ``arguments`` and nodes, if nothing computes in
    between."""
    seen = set[str]()
    while source not in arguments and source not in seen and node_of(source) in inside:
        seen.add(source)
        node = inside[node_of(source)]
        if node.op != "Identity" or not node.input:
            break
        source = node.input[0]
    return source


def _called(node: Any, functions: Mapping[str, Any]) -> list[str]:
    """Return the functions that ``node`` calls: by name, and by its attributes."""
    names = [node.op] if node.op in functions else []
    for value in node.attr.values():
        if value.WhichOneof("value") == "func":
            names.append(value.func.name)
        names += [each.name for each in value.list.func]
    return [name for name in names if name in functions]


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"
