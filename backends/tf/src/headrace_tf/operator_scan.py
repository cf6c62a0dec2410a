"""Finds what a graph would do besides computing: walks from what is asked for, through the functions that it calls.

Source of the rules: `headrace_tf.operators`. What nothing asks for never runs, and is not looked at: every SavedModel
has the operators that saved it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from headrace import LoadError, one_line
from headrace_tf.model_graph import ModelGraph
from headrace_tf.operators import FILE_INPUTS, why_refused

#: An attribute by which the engine may put another function in the place of one that is called.
_INTERCHANGEABLE = "api_implements"
_PASSES_ON = ("Identity", "PlaceholderWithDefault")


def check(tensorflow: Any, model: str, graph: ModelGraph) -> tuple[str, ...]:
    """Raise `LoadError` for an operator that is refused, naming the file, the operator and the reason.

    Returns the tensors that name files which ``graph.init_ops`` read: whoever runs these must give them names himself.
    """
    walk = _Walk(tensorflow, model, graph)
    walk.go(graph.outputs.values(), may_read=False)
    if graph.checkpoint is not None:
        own = graph.checkpoint.filename_tensor
        for tensor in walk.go([graph.checkpoint.restore_op], may_read=True):
            if _tensor(walk.passed_on(tensor)) != _tensor(own):
                walk.refuse("RestoreV2", tensor, "it reads files other than the model's variables")
    return tuple(walk.go(graph.init_ops, may_read=True))


class _Walk:
    def __init__(self, tensorflow: Any, model: str, graph: ModelGraph) -> None:
        self._model, self._path = model, graph.path
        self._nodes = {node.name: node for node in graph.graph_def.node}
        self._functions = {each.signature.name: each for each in graph.graph_def.library.function}
        self._gradients = {each.function_name: each.gradient_func for each in graph.graph_def.library.gradient}
        self._interchangeable = [name for name, each in self._functions.items() if _INTERCHANGEABLE in each.attr]
        self._stateful = _stateful_operators(tensorflow)
        self._known: dict[tuple[str, bool], list[int]] = {}
        self._entered = set[str]()

    def go(self, roots: Iterable[str], may_read: bool) -> list[str]:
        """Look at all that ``roots``, nodes or tensors, need. The tensors of the graph that name files which it reads;
        unless it ``may_read``, that is refused."""
        nodes = self._needed(roots)
        names: list[str] = []
        for node in nodes:
            names += [node.input[index] for index in self._file_inputs(node, may_read)]
        return names

    def passed_on(self, tensor: str) -> str:
        """Where ``tensor`` comes from, if nothing computes on the way."""
        seen = set[str]()
        while tensor not in seen:
            seen.add(tensor)
            node = self._nodes.get(tensor.partition(":")[0])
            if node is None or node.op not in _PASSES_ON or not node.input:
                break
            tensor = node.input[0]
        return tensor

    def refuse(self, operator: str, node: str, reason: str) -> None:
        raise LoadError(
            f"unable to load model '{self._model}': '{self._path}' has the operator '{one_line(operator)}' (node "
            f"'{one_line(node)}'), and {reason}. A graph from somebody else must not do that; if you trust this one, "
            'say so in its config: parameters { key: "trust" value { string_value: "true" } }'
        )

    def _needed(self, roots: Iterable[str]) -> list[Any]:
        waiting, found = [_node(root) for root in roots], dict[str, Any]()
        while waiting:
            name = waiting.pop()
            if name in found or name not in self._nodes:
                continue
            found[name] = self._nodes[name]
            waiting += [_node(each) for each in found[name].input]
        return list(found.values())

    def _file_inputs(self, node: Any, may_read: bool) -> list[int]:
        """Which inputs of ``node`` name files that it, or a function that it calls, reads."""
        if node.op in FILE_INPUTS and may_read:
            return [FILE_INPUTS[node.op]]
        if reason := why_refused(node, node.op in self._stateful):
            self.refuse(node.op, node.name, reason)
        called = _called(node, self._functions)
        skipped = 1 if node.op in ("If", "StatelessIf", "Case", "StatelessCase") else 0
        return sorted({index + skipped for name in called for index in self._file_arguments(name, may_read)})

    def _file_arguments(self, name: str, may_read: bool) -> list[int]:
        """Which arguments of the function ``name`` name files that it reads. Each function is looked at once."""
        known = self._known
        if (name, may_read) in known:
            if name in self._entered and may_read:
                self.refuse(name, name, "it calls itself, so that nobody can tell which files it reads")
            return known[name, may_read]
        known[name, may_read] = []
        self._entered.add(name)
        function = self._functions[name]
        arguments = {each.name: index for index, each in enumerate(function.signature.input_arg)}
        inside = {each.name: each for each in function.node_def}
        found = set[int]()
        others = [*self._interchangeable, *([self._gradients[name]] if name in self._gradients else [])]
        for other in others:
            if other in self._functions and other != name and self._file_arguments(other, may_read):
                self.refuse(other, name, "it reads files by a function that stands in for another")
        for node in function.node_def:
            for index in self._file_inputs(node, may_read):
                source = node.input[index]
                while source in inside or _node(source) in inside:
                    origin = inside[_node(source)]
                    if origin.op != "Identity":
                        break
                    source = origin.input[0]
                if source not in arguments:
                    self.refuse(node.op, f"{name}/{node.name}", "it reads files that are not the model's own")
                found.add(arguments[source])
        known[name, may_read] = sorted(found)
        self._entered.discard(name)
        return known[name, may_read]


def _called(node: Any, functions: Mapping[str, Any]) -> list[str]:
    """The functions that ``node`` calls: by name, and by its attributes."""
    names = [node.op] if node.op in functions else []
    for value in node.attr.values():
        if value.WhichOneof("value") == "func":
            names.append(value.func.name)
        names += [each.name for each in value.list.func]
    return [name for name in names if name in functions]


def _node(tensor: str) -> str:
    return tensor.lstrip("^").partition(":")[0]


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"


@cache
def _stateful_operators(tensorflow: Any) -> frozenset[str]:
    """The operators that TensorFlow brings and that have state, whatever a file says of them."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session

    buffer = pywrap_tf_session.TF_GetAllOpList()
    listed = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(buffer))
    return frozenset(each.name for each in listed.op if each.is_stateful)
