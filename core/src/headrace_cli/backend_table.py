"""``headrace plugins --backends``: a Markdown table of the declared features of each backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.backends.base import (
    Backend,
    BaseInstance,
    DeferredInstance,
    Instance,
    RequestInstance,
    StreamInstance,
)
from headrace.messages import dtypes
from headrace.messages.dtypes import DataType

_HEAD = ("Backend", "Devices", "Data types", "Batches", "Streams", "Shares", "Completes configs", "Hardware")
#: The input of one execution: the rows of many requests as one tensor, or the requests of a batch.
_BATCHES: dict[type[BaseInstance], str] = {
    Instance: "rows",
    RequestInstance: "requests",
    DeferredInstance: "requests",
    StreamInstance: "single requests",
}
_STREAMING = (StreamInstance, DeferredInstance)
#: If at most this many data types are missing, the table names the missing ones.
_FEW = 3


def backend_table(backends: Iterable[type[Backend]]) -> str:
    """Return a table with a row for each of ``backends``, sorted by name.

    ``Shares`` is "yes" if its instances share an object; ``Streams`` is "yes" if a request may get any number of
    responses. Both are "-" if the backend does not declare its kinds of instances (``Backend.instance_classes``).
    """
    rows = [_row(backend) for backend in sorted(backends, key=lambda each: each.name)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (_HEAD, ["---"] * len(_HEAD), *rows))


def _row(backend: type[Backend]) -> Sequence[str]:
    instance_classes = backend.instance_classes
    batches = ", ".join(dict.fromkeys(_BATCHES[each] for each in instance_classes))
    return (
        f"`{backend.name}`",
        ", ".join(kind.upper() if kind != "model" else "chosen by the model" for kind in backend.devices),
        _data_types(backend.dtypes),
        batches or "-",
        _yes(any(each in _STREAMING for each in instance_classes)) if instance_classes else "-",
        _yes(_shares(backend)),
        _yes(backend.complete_config is not Backend.complete_config),
        backend.hardware or "-",
    )


def _shares(backend: type[Backend]) -> bool:
    """True if ``backend`` overrides ``share`` and its return type is not None."""
    return backend.share is not Backend.share and backend.share.__annotations__.get("return", "") not in (None, "None")


def _data_types(claimed: Sequence[DataType]) -> str:
    missing = [each.name for each in dtypes.ALL if each not in claimed]
    if not missing:
        return "all"
    if len(missing) <= _FEW:
        return f"all but {', '.join(missing)}"
    return ", ".join(each.name for each in dtypes.ALL if each in claimed)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
