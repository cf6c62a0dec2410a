"""Builds a function of a program of torch.export: its JSON graph becomes a ``torch.fx`` graph of checked calls.

The new graph has its own names, and calls only functions from `find_operator`, so no text of the file becomes code.
Operators in the graph read the sizes of tensors; the texts of sizes in the file are not used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace_torch.program_check import HIGHER_ORDER, TrustRequired, find_operator
from headrace_torch.program_signature import SCALAR_TYPES
from headrace_torch.script_effects import drops_nothing
from headrace_torch.unsafe_operators import ZEROED

_LAYOUTS: Mapping[int, str] = {1: "sparse_coo", 2: "sparse_csr", 3: "sparse_csc", 4: "sparse_bsr", 5: "sparse_bsc"}
_MEMORY_FORMATS: Mapping[int, str] = {
    1: "contiguous_format",
    2: "channels_last",
    3: "channels_last_3d",
    4: "preserve_format",
}
#: Operators that may return their input unchanged, although their schema does not declare it.
_MAY_RETURN_INPUT = frozenset(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"))
_HIGHER_ORDER = "torch.ops.higher_order."
_INPUT, _STATE, _NEITHER = frozenset(("input",)), frozenset(("state",)), frozenset[str]()
_BOTH = _INPUT | _STATE


class ProgramGraph:
    """``function(*state, *inputs)`` gives the results in the order of the file's.

    - ``state``: the folder and the name of each parameter, buffer and constant that it takes first.
    - ``mutated``: the buffers whose new values follow the results.
    - ``place`` maps a device of the file to the one on which the program runs.
    - ``writes``: it may write to its inputs. ``changes``: it may write to its state.
    - ``is_random``: it draws random numbers. ``loops``: it repeats something until a condition holds, perhaps for ever.
    """

    def __init__(self, torch: Any, program: Mapping[str, Any], place: Callable[[str], str]) -> None:
        self._torch, self._place = torch, place
        module = program["graph_module"]
        signature, graph = module["signature"], module["graph"]
        self.state: list[tuple[str, str]] = []
        self.mutated: list[str] = []
        builder = _Builder(torch, self._place)
        self._bind_inputs(builder, signature["input_specs"], graph["inputs"])
        for node in graph["nodes"]:
            builder.add(node)
        self.function: Callable[..., Sequence[Any]] = builder.finish(self._results(builder, signature, graph))
        self.writes = bool(_INPUT & builder.written)
        self.changes = bool(_STATE & builder.written) or bool(self.mutated)
        self.is_random, self.loops = builder.is_random, builder.loops

    def _bind_inputs(self, builder: _Builder, specs: Sequence[Any], arguments: Sequence[Any]) -> None:
        pairs = zip(specs, arguments, strict=True)
        for spec, argument in sorted(pairs, key=lambda pair: "user_input" in pair[0]):  # the state first
            ((kind, details),) = spec.items()
            if kind == "constant_input":
                builder.values[details["name"]] = builder.constant(details["value"])
                continue
            if kind in ("custom_obj", "token"):
                raise TrustRequired(f"it needs an object of its own ({kind}), which may be of any library")
            ((type_, content),) = argument.items()
            if type_ != "as_tensor":
                if kind != "user_input":
                    raise ValueError(f"its {kind} is no tensor")
                if "sym" in type_:
                    raise ValueError("it takes a number that varies, and requests have tensors only")
                continue  # a constant, which is in the graph wherever it is used
            node = builder.graph.placeholder(f"in_{len(builder.values)}")
            builder.values[content["name"]] = node
            builder.watched[node] = _INPUT if kind == "user_input" else _STATE
            if kind == "user_input":
                continue
            if kind == "parameter":
                self.state.append(("weights", details["parameter_name"]))
            elif kind == "buffer":
                self.state.append(("weights" if details["persistent"] else "constants", details["buffer_name"]))
            elif kind == "tensor_constant":
                self.state.append(("constants", details["tensor_constant_name"]))
            else:
                raise ValueError(f"it has an input of the kind '{kind}'")

    def _results(self, builder: _Builder, signature: Mapping[str, Any], graph: Mapping[str, Any]) -> list[Any]:
        results, mutated = [], []
        for spec, argument in zip(signature["output_specs"], graph["outputs"], strict=True):
            ((kind, details),) = spec.items()
            if kind in ("user_output", "loss_output"):
                results.append(builder.argument(argument))
            elif kind in ("buffer_mutation", "parameter_mutation"):
                mutated.append(builder.argument(argument))
                self.mutated.append(details.get("buffer_name") or details["parameter_name"])
            elif kind not in ("user_input_mutation", "token"):
                raise ValueError(f"it has a result of the kind '{kind}'")
        return results + mutated


class _Builder:
    """Makes one ``torch.fx`` graph. ``values`` maps each name in the file to its value."""

    def __init__(self, torch: Any, place: Callable[[str], str]) -> None:
        self._torch, self._place = torch, place
        self.graph = torch.fx.Graph()
        self.values: dict[str, Any] = {}
        #: Values that may be an input or state, or a view of one. ``written`` has the kinds that are written to.
        self.watched: dict[Any, frozenset[str]] = {}
        self.written: frozenset[str] = frozenset()
        self.is_random = self.loops = False
        self._parts: dict[str, Any] = {}

    def finish(self, results: Sequence[Any] | Any) -> Any:
        self.graph.output(results if self._is_node(results) else tuple(results))
        return self._torch.fx.GraphModule(self._parts, self.graph)

    # ------------------------------------------------------------------ nodes

    def add(self, node: Mapping[str, Any]) -> None:
        target = node["target"]
        if target.startswith(_HIGHER_ORDER):
            value = self._call_with_graphs(target.removeprefix(_HIGHER_ORDER), node)
        else:
            value = self._call(find_operator(self._torch, target), node)
        outputs = node["outputs"]
        if len(outputs) == 1 and target.startswith(_HIGHER_ORDER) and node.get("is_hop_single_tensor_return") is False:
            self._bind_all(outputs, value)
        elif len(outputs) == 1:
            self._bind(outputs[0], value)
        else:
            self._bind_all(outputs, value)

    def _call(self, called: Any, node: Mapping[str, Any]) -> Any:
        arguments: list[Any] = []
        named: dict[str, Any] = {}
        schema = getattr(called, "_schema", None)
        known = {argument.name for argument in schema.arguments} if schema else set()
        for each in node["inputs"]:
            value = self.argument(each["arg"])
            if each.get("kind") == 2 or (
                each.get("kind") is None and arguments and each["name"] in _named_only(schema)
            ):
                if each["name"] not in known:  # it would become a name in the code of the graph
                    raise ValueError(f"it calls '{node['target']}' with '{each['name']}', which that does not take")
                named[each["name"]] = value
            else:
                arguments.append(value)
        result = self.graph.call_function(called, tuple(arguments), named)
        if schema and schema.name.partition("::")[2] in ZEROED:
            result = self.graph.call_function(self._torch.ops.aten.zero_.default, (result,))
        if schema:
            bound = dict(zip([argument.name for argument in schema.arguments], arguments, strict=False)) | named
            self._watch(result, schema, bound)
            if self._torch.Tag.nondeterministic_seeded in called.tags:
                defaults = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
                self.is_random |= not drops_nothing(defaults | bound)
        return result

    def _watch(self, result: Any, schema: Any, bound: Mapping[str, Any]) -> None:
        """Record the values that are written to, and those that may share memory with ``result``."""
        touched = self._origins(bound.values())
        if not touched:
            return
        aliases = {argument.name: argument.alias_info for argument in schema.arguments if argument.alias_info}
        written = {name for name, alias in aliases.items() if alias.is_write}
        self.written |= self._origins(bound.get(name) for name in written)
        if any(each.alias_info for each in schema.returns) or schema.name.partition("::")[2] in _MAY_RETURN_INPUT:
            self.watched[result] = touched

    def _origins(self, values: Iterable[Any]) -> frozenset[str]:
        """Return the kinds that ``values`` may be: inputs, state or both."""
        found = (self.watched.get(each, _NEITHER) for value in values for each in _nodes(value))
        return _NEITHER.union(*found)

    def _bind_all(self, outputs: Sequence[Any], value: Any) -> None:
        for index, output in enumerate(outputs):
            if "as_none" not in output:
                self._bind(output, self._item(value, index))

    def _bind(self, output: Mapping[str, Any], value: Any) -> None:
        if set(output) == {"name"}:  # an element of as_tensors
            self.values[output["name"]] = value
            return
        ((kind, content),) = output.items()
        if kind == "as_none":
            return
        if isinstance(content, list):
            for index, each in enumerate(content):
                self._bind(each, self._item(value, index))
        elif kind == "as_tensor":
            self.values[content["name"]] = value
        elif kind == "as_name":
            self.values[content] = value
        elif kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
            self.values[content["as_name"]] = value
        else:
            raise ValueError(f"it has a result of the type '{kind}'")

    def _item(self, value: Any, index: int) -> Any:
        item = self.graph.call_function(operator.getitem, (value, index))
        if value in self.watched:
            self.watched[item] = self.watched[value]
        return item

    # ------------------------------------------------------------------ arguments

    def argument(self, argument: Mapping[str, Any]) -> Any:
        ((kind, content),) = argument.items()
        if kind == "as_tensor":
            return self.values[content["name"]]
        if kind in ("as_tensors", "as_sym_ints", "as_sym_floats", "as_sym_bools", "as_optional_tensors"):
            return [self._element(each) for each in content]
        if kind in ("as_sym_int", "as_sym_float", "as_sym_bool", "as_optional_tensor"):
            return self._element(content)
        if kind == "as_nested_tensors":
            return [[self._element(each) for each in inner] for inner in content]
        return self.constant(argument)

    def _element(self, element: Mapping[str, Any]) -> Any:
        if "name" in element:
            return self.values[element["name"]]
        ((kind, content),) = element.items()
        if kind == "as_name":
            return self.values[content]
        return self.values[content["name"]] if kind == "as_tensor" else self.constant(element)

    def constant(self, argument: Mapping[str, Any]) -> Any:
        """Return the value of ``argument``, of the type that it names. Nothing else becomes part of the graph."""
        ((kind, content),) = argument.items()
        if kind == "as_none":
            return None
        if kind in _PLAIN:
            return _PLAIN[kind](content)
        torch = self._torch
        if kind == "as_scalar_type":
            return getattr(torch, SCALAR_TYPES[content][0])
        if kind == "as_memory_format":
            return getattr(torch, _MEMORY_FORMATS[content])
        if kind == "as_layout":
            return getattr(torch, _LAYOUTS.get(content, "strided"))
        if kind == "as_device":
            return torch.device(self._place(_device(content)))
        raise TrustRequired(f"it gives an operator an argument that is neither a tensor nor a number ({kind})")

    # ------------------------------------------------------------------ graphs within the graph

    def _call_with_graphs(self, name: str, node: Mapping[str, Any]) -> Any:
        if name not in HIGHER_ORDER:
            raise TrustRequired(f"it calls '{node['target'][:200]}', which runs graphs in a way of its own")
        arguments = []
        for each in node["inputs"]:
            if each["name"] and each.get("kind") == 2:
                raise ValueError(f"it calls '{node['target']}' with '{each['name']}', which that does not take")
            argument = each["arg"]
            arguments.append(self._part(argument["as_graph"]) if "as_graph" in argument else self.argument(argument))
        self.loops |= name == "while_loop"
        if name == "wrap_with_autocast":
            arguments[0] = self._place(arguments[0]).partition(":")[0]
        result = self.graph.call_function(HIGHER_ORDER[name], tuple(arguments))
        self.watched[result] = self._origins(arguments)  # an inner graph may return its arguments
        return result

    def _part(self, value: Mapping[str, Any]) -> Any:
        inner = _Builder(self._torch, self._place)
        graph = value["graph"]
        for argument in graph["inputs"]:
            ((kind, content),) = argument.items()
            name = content["name"] if kind == "as_tensor" else content["as_name"]
            inner.values[name] = inner.graph.placeholder(f"in_{len(inner.values)}")
            inner.watched[inner.values[name]] = _BOTH
        for node in graph["nodes"]:
            inner.add(node)
        self.written |= inner.written
        self.is_random |= inner.is_random
        self.loops |= inner.loops
        results = [inner.argument(argument) for argument in graph["outputs"]]
        name = f"part_{len(self._parts)}"
        self._parts[name] = inner.finish(results[0] if graph.get("is_single_tensor_return") else results)
        return self.graph.get_attr(name)

    def _is_node(self, value: Any) -> bool:
        return isinstance(value, self._torch.fx.Node)


#: Constants by the name that the file has for their type.
_PLAIN: Mapping[str, Callable[[Any], Any]] = {
    "as_int": int,
    "as_float": float,
    "as_bool": bool,
    "as_string": str,
    "as_complex": lambda value: complex(float(value["real"]), float(value["imag"])),
    "as_ints": lambda values: [int(value) for value in values],
    "as_floats": lambda values: [float(value) for value in values],
    "as_bools": lambda values: [bool(value) for value in values],
    "as_strings": lambda values: [str(value) for value in values],
    "as_int_lists": lambda values: [[int(value) for value in inner] for inner in values],
    "as_float_lists": lambda values: [[float(value) for value in inner] for inner in values],
}


def _nodes(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [each for item in value for each in _nodes(item)]
    return [] if value is None or isinstance(value, (bool, int, float, str, complex)) else [value]


def _named_only(schema: Any) -> set[str]:
    return {argument.name for argument in schema.arguments if argument.kwarg_only} if schema else set()


def _device(device: Mapping[str, Any]) -> str:
    return device["type"] if device.get("index") is None else f"{device['type']}:{int(device['index'])}"


def devices(program: Mapping[str, Any]) -> set[str]:
    """Return the devices of a program's tensors at its export, by PyTorch's names."""
    return {_device(meta["device"]) for meta in program["graph_module"]["graph"]["tensor_values"].values()}
