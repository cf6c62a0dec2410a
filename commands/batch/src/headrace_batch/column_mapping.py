"""Which columns of a file are the inputs of a model, and which are copied to the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import pyarrow as pa

from headrace import InvalidArgument, ModelView
from headrace_batch.row_files import ARRAY, Chunk, Column


class ColumnMapping:
    """The columns of each input. ``wanted`` maps inputs to patterns of columns; without one, a column of the same name.

    ``known`` are the columns of the file; empty if only its rows tell.
    """

    def __init__(self, model: ModelView, wanted: Mapping[str, str], known: Sequence[str]) -> None:
        """Raises `InvalidArgument` for an input or a column that is not there."""
        for name in wanted:
            if name not in model.inputs:
                raise InvalidArgument(f"--map names input '{name}'; model '{model.name}' has {_listed(model.inputs)}")
        self._model = model
        self._patterns = {name: wanted.get(name, name) for name in model.inputs}
        if list(known) == [ARRAY]:
            if len(model.inputs) != 1 or wanted:
                raise InvalidArgument(f"a NumPy file is one input; model '{model.name}' has {_listed(model.inputs)}")
            self._patterns = dict.fromkeys(model.inputs, ARRAY)
        self._names = self._find(known) if known else {}

    def columns(self, chunk: Chunk) -> Mapping[str, Sequence[Column]]:
        """Return the columns of each input. Raises `InvalidArgument`."""
        names = self._names or self._find(list(chunk.columns))
        return {name: [chunk.columns[column] for column in columns] for name, columns in names.items()}

    def others(self, names: Sequence[str]) -> list[str]:
        """Return the columns that are no inputs."""
        used = {column for columns in self._find(names).values() for column in columns}
        return [name for name in names if name not in used]

    def _find(self, known: Sequence[str]) -> dict[str, list[str]]:
        found = {}
        for name, pattern in self._patterns.items():
            if pattern in known:
                found[name] = [pattern]
            elif columns := [column for column in known if fnmatchcase(column, pattern)]:
                found[name] = columns
            elif not self._model.inputs[name].optional or pattern != name:
                near = get_close_matches(pattern, known, 1)
                hint = f"; did you mean '{near[0]}'?" if near else f"; the file has {_listed(known)}"
                raise InvalidArgument(f"no column '{pattern}' for input '{name}' (--map {name}=COLUMN){hint}")
        return found


def kept_fields(names: Sequence[str], types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the columns that are copied. Those of JSON lines are copied as JSON."""
    return pa.schema([pa.field(name, types.get(name, pa.string())) for name in names])


def _listed(names: object) -> str:
    shown = [f"'{name}'" for name in names]  # type: ignore[attr-defined]
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "") if shown else "none"
