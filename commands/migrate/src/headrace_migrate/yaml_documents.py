"""YAML as nodes with places in the text. No objects are constructed. An alias is the node of its anchor."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from headrace_migrate.report import BadInput

#: The maximum number of nodes of one file. An alias adds none.
_MAX_NODES = 500_000
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def documents(text: str, source: str) -> list[yaml.Node]:
    """Return the root of each document of ``text`` that is not empty. Raises `BadInput`."""
    for number, line in enumerate(text.splitlines(), 1):
        if "{{" in line and not line.lstrip().startswith("#"):
            raise BadInput(
                f"{source}:{number}: a template of Helm or Jinja: '{line.strip()[:60]}'. Render it first: "
                "helm template CHART > manifest.yaml"
            )
    try:
        return [root for root in yaml.compose_all(text, Loader=_LOADER) if root is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark is not None else ""
        raise BadInput(f"{source}{place}: no YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise BadInput(f"{source}: no YAML: {' '.join(str(error).split())[:200]}") from error


def nodes_of(root: yaml.Node) -> Iterator[yaml.Node]:
    """Yield ``root`` and all nodes below it, each once. Raises `BadInput` for more than 500,000."""
    seen, waiting = set[int](), [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if len(seen) > _MAX_NODES:
            raise BadInput(f"more than {_MAX_NODES} nodes: no manifest is so large")
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [child for pair in reversed(node.value) for child in reversed(pair)]
        elif isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)


def fields_of(node: yaml.Node | None) -> dict[str, yaml.Node]:
    """Return the text-keyed fields of a mapping, with those of merged mappings (``<<``). Empty for other nodes."""
    found, waiting, seen = dict[str, yaml.Node](), [node], set[int]()
    while waiting:
        mapping = waiting.pop(0)
        if not isinstance(mapping, yaml.MappingNode) or id(mapping) in seen:
            continue
        seen.add(id(mapping))
        for key, value in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value == "<<":
                waiting += value.value if isinstance(value, yaml.SequenceNode) else [value]
            else:
                found.setdefault(key.value, value)
    return found


def field_at(node: yaml.Node | None, *path: str) -> yaml.Node | None:
    """Return the node at ``path`` below ``node``; None if it is not there."""
    for name in path:
        node = fields_of(node).get(name)
    return node


def text_of(node: yaml.Node | None) -> str:
    """Return the text of a scalar; empty for anything else."""
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""


def items_of(node: yaml.Node | None) -> list[yaml.Node]:
    """Return the items of a sequence; none for anything else."""
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def line_of(node: yaml.Node) -> int:
    """Return the line of ``node``, from 1."""
    return int(node.start_mark.line) + 1
