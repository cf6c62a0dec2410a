"""Which columns of a file are the inputs of a model, and which are copied to the result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

import pyarrow as pa

from headrace import InvalidArgument, ModelView
from headrace_batch.row_files import ARRAY, Chunk, Column


class ColumnMapping:
    """The columns of each input. ``wanted`` maps inputs to patterns of columns (default: the column of the same name).

    ``known`` are the columns of the file; empty if its rows must be read first.
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
        """Return the columns of each input. Raises `InvalidArgument` if the first chunk has none for an input.

        In later chunks, and in a chunk where no line is JSON, the values of such an input are missing.
        """
        is_first = not chunk.number and len(chunk.broken) < chunk.count
        names = self._names or self._find(chunk.columns, is_first)
        nothing = [None] * chunk.count
        return {name: [chunk.columns[each] for each in columns] or [nothing] for name, columns in names.items()}

    def others(self, names: Collection[str], is_first: bool = True) -> list[str]:
        """Return the columns that are no inputs. Raises `InvalidArgument` if the first chunk lacks an input."""
        used = {column for columns in self._find(names, is_first).values() for column in columns}
        return [name for name in names if name not in used]

    def _find(self, known: Collection[str], is_first: bool = True) -> dict[str, list[str]]:
        found = {}
        for name, pattern in self._patterns.items():
            if pattern in known:
                found[name] = [pattern]
            elif columns := [column for column in known if fnmatchcase(column, pattern)]:
                found[name] = columns
            elif not self._model.inputs[name].optional or pattern != name:
                if not is_first:
                    found[name] = []
                    continue
                near = get_close_matches(pattern, known, 1)
                hint = f"; did you mean '{near[0]}'?" if near else f"; the file has {_listed(known)}"
                raise InvalidArgument(f"no column '{pattern}' for input '{name}' (--map {name}=COLUMN){hint}")
        return found


def copied_fields(names: Sequence[str], types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the schema of the copied columns. Columns of JSON lines are copied as JSON."""
    return pa.schema([pa.field(name, types.get(name, pa.string())) for name in names])


def _listed(names: object) -> str:
    shown = [f"'{name}'" for name in names]  # type: ignore[attr-defined]
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "") if shown else "none"
