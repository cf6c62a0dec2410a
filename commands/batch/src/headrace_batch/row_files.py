"""Reads the rows of a file in chunks: Parquet, Arrow, CSV, JSON lines, NumPy.

A chunk has columns by name. The columns of a CSV file are text, so that a wrong value is an error of its row and not of
the file. The same holds for a line with too many or too few values, and for a line that is no JSON.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from headrace import InvalidArgument
from headrace_batch.csv_quotes import line_of_open_quote

#: A column: Arrow's array, or Python objects of any type (JSON), or a NumPy array with a row in each first index.
Column: TypeAlias = "pa.Array | Sequence[Any] | np.ndarray[Any, Any]"
#: The name of the column of a NumPy file.
ARRAY = "array"
#: The bytes that a line of a CSV file may have. So many are parsed at a time.
_LONGEST_LINE = 16 << 20


@dataclass(frozen=True)
class Chunk:
    """Rows from ``first`` on. ``broken`` has why a row cannot be read, by its place in the chunk."""

    number: int
    first: int
    count: int
    columns: Mapping[str, Column]
    broken: Mapping[int, str] = field(default_factory=dict)


class RowFile:
    """A file of rows. ``total`` is their number, or None if it is known only after reading."""

    total: int | None = None
    #: The types of the columns by name; empty for JSON lines.
    columns: Mapping[str, pa.DataType]

    def __init__(self, path: Path) -> None:
        """Open the file. Raises `InvalidArgument` if it has another format."""
        self.path = path
        self.columns = {}

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Yield all rows in order, ``size`` in each chunk but the last. Raises `InvalidArgument`."""
        first = number = 0
        for columns, count, broken in self.read(size):
            yield Chunk(number, first, count, columns, broken)
            first, number = first + count, number + 1

    def read(self, size: int) -> Iterator[tuple[Mapping[str, Column], int, Mapping[int, str]]]:
        """Yield columns, the number of rows, and the rows that cannot be read."""
        raise NotImplementedError


class ParquetRows(RowFile):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = pa.parquet.ParquetFile(path)
        self.total = self._file.metadata.num_rows
        self.columns = _types(path, self._file.schema_arrow)

    def read(self, size: int) -> Iterator[tuple[Mapping[str, Column], int, Mapping[int, str]]]:
        yield from _of_batches(self._file.iter_batches(batch_size=size), size)


class ArrowRows(RowFile):
    """Arrow's file format, or its stream."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        source = pa.memory_map(str(path))
        try:
            reader = pa.ipc.open_file(source)
            self._batches: Iterator[pa.RecordBatch] = map(reader.get_batch, range(reader.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            reader = pa.ipc.open_stream(source)
            self._batches = iter(reader)
        self.columns = _types(path, reader.schema)

    def read(self, size: int) -> Iterator[tuple[Mapping[str, Column], int, Mapping[int, str]]]:
        yield from _of_batches(self._batches, size)


class CsvRows(RowFile):
    """The columns of the header, as text. A row with more or fewer values, or that is no UTF-8, is broken."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if line := line_of_open_quote(path):
            raise InvalidArgument(f"line {line} of '{path}' has a quote that is never closed")
        #: The place, from 0, and the number of values of each skipped row.
        self._places, self._counts, self._is_open = array("q"), array("q"), False
        reading = pa.csv.ReadOptions(block_size=_LONGEST_LINE, use_threads=False)  # threads do not number the rows
        parsing = pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=self._skip)
        with pa.csv.open_csv(path, reading, parsing) as reader:
            self.columns = dict.fromkeys(_types(path, reader.schema), pa.string())
        self._is_open = True
        options = pa.csv.ConvertOptions(column_types=self.columns, strings_can_be_null=False, check_utf8=False)
        self._reader = pa.csv.open_csv(path, reading, parsing, options)

    def _skip(self, row: Any) -> str:
        """Record a row with too many or too few values. The first row after the header has the number 2."""
        if self._is_open:
            self._places.append(row.number - 2)
            self._counts.append(row.actual_columns)
        return "skip"

    def read(self, size: int) -> Iterator[tuple[Mapping[str, Column], int, Mapping[int, str]]]:
        first = reported = 0
        for columns, count, _ in _of_batches(self._filled(), size):
            broken: dict[int, str] = {}
            while reported < len(self._places) and self._places[reported] < first + count:
                why = f"the row has {self._counts[reported]} values; the header has {len(self.columns)}"
                broken[self._places[reported] - first], reported = why, reported + 1
            yield {name: _text(name, column, broken) for name, column in columns.items()}, count, broken
            first += count

    def _filled(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows, with nulls in place of the skipped ones."""
        nothing = pa.RecordBatch.from_pylist([{}], self._reader.schema)
        row = filled = 0
        for batch in self._reader:  # records the rows that are skipped before its last one
            done = 0
            while filled < len(self._places) and self._places[filled] - row <= len(batch) - done:
                before = self._places[filled] - row
                yield from (batch.slice(done, before), nothing)
                done, row, filled = done + before, row + before + 1, filled + 1
            yield batch.slice(done)
            row += len(batch) - done
        for _ in range(filled, len(self._places)):
            yield nothing


class JsonRows(RowFile):
    """A JSON object in each line; empty lines are no rows."""

    def read(self, size: int) -> Iterator[tuple[Mapping[str, Column], int, Mapping[int, str]]]:
        rows: list[Mapping[str, Any]] = []
        broken: dict[int, str] = {}
        with self.path.open("rb") as lines:
            for line in lines:
                if line.isspace():
                    continue
                row, error = _json_row(line)
                if error:
                    broken[len(rows)] = error
                rows.append(row)
                if len(rows) == size:
                    yield _of_objects(rows), len(rows), broken
                    rows, broken = [], {}
        if rows:
            yield _of_objects(rows), len(rows), broken


class NumpyRows(RowFile):
    """A row in each first index of an array. The file is mapped, not read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(self._array, np.ndarray) or not self._array.ndim:
            raise InvalidArgument(f"'{path}' has no array with rows")
        self.total = len(self._array)
        self.columns = {ARRAY: pa.null()}

    def read(self, size: int) -> Iterator[tuple[Mapping[str, Column], int, Mapping[int, str]]]:
        for first in range(0, len(self._array), size):
            piece = self._array[first : first + size]
            yield {ARRAY: piece}, len(piece), {}


#: The kinds of files by their ending.
KINDS: dict[str, type[RowFile]] = {
    ".parquet": ParquetRows,
    ".arrow": ArrowRows,
    ".csv": CsvRows,
    ".jsonl": JsonRows,
    ".npy": NumpyRows,
}


def open_rows(path: Path) -> RowFile:
    """Return the rows of the file. Raises `InvalidArgument` if it cannot be read, or has an unknown ending."""
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        raise InvalidArgument(f"'{path}' ends in '{path.suffix}'; the endings are {', '.join(KINDS)}")
    try:
        return kind(path)
    except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors
        raise InvalidArgument(f"cannot read '{path}': {error}") from error


def _of_batches(
    batches: Iterator[pa.RecordBatch], size: int
) -> Iterator[tuple[Mapping[str, Column], int, Mapping[int, str]]]:
    """Yield the rows of ``batches`` in pieces of ``size`` rows. The last piece may be smaller."""
    pending: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        pending.append(batch)
        count += len(batch)
        if count < size:
            continue
        table = pa.Table.from_batches(pending)
        for first in range(0, count - size + 1, size):
            yield _columns(table.slice(first, size)), size, {}
        rest = count % size
        pending, count = table.slice(len(table) - rest).to_batches(), rest
    if count:
        yield _columns(pa.Table.from_batches(pending)), count, {}


def _types(path: Path, schema: pa.Schema) -> dict[str, pa.DataType]:
    """Return the types of the columns of a file by name, as in `_columns`. Raises `InvalidArgument`."""
    found: dict[str, pa.DataType] = {}
    for each in schema:
        if each.name in found:
            raise InvalidArgument(f"two columns of '{path}' have the name '{each.name}'")
        found[each.name] = _plain_type(each.type)
    return found


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _columns(table: pa.Table) -> Mapping[str, Column]:
    """Return the columns, with values in place of dictionaries: each part of a file may have another dictionary."""
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    return {name: column.cast(_plain_type(column.type)) for name, column in columns.items()}


def _text(name: str, column: Column, broken: dict[int, str]) -> Column:
    """Return a column of text, with null for each value that is no UTF-8. Add the reason to ``broken``."""
    assert isinstance(column, pa.Array)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        found: list[str | None] = []
        for place, value in enumerate(column.view(pa.binary()).to_pylist()):
            try:
                found.append(None if value is None else value.decode())
            except UnicodeDecodeError as error:
                found.append(None)
                broken.setdefault(place, f"column '{name}': {error}")
        return pa.array(found, pa.string())
    return column


def _json_row(line: bytes) -> tuple[Mapping[str, Any], str]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {}, f"the line is no JSON: {error}"
    return (found, "") if isinstance(found, dict) else ({}, f"the line is a {type(found).__name__}, not an object")


def _of_objects(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Column]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
