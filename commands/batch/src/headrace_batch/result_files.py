"""Writes the parts of the result, and the file at the end.

A part has the rows of one chunk in Arrow's format, and is written atomically. A killed job resumes at the first missing
part, so every row is in the result once.
"""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from headrace import InvalidArgument
from headrace_batch.arrow_types import is_list

_JOB = "job.json"
#: The size of a row group of Parquet, in rows or bytes.
_GROUP_ROWS, _GROUP_BYTES = 1 << 17, 64 << 20
#: Marks a column that is copied from JSON lines: each value is the text of a JSON value.
COPIED_JSON = {b"json": b"1"}


class ResultParts:
    """The folder of the parts of one job, beside its result. One process at a time writes to it.

    ``job`` describes the inference. Raises `InvalidArgument` if the folder belongs to another job or is in use.
    """

    def __init__(self, result: Path, job: Mapping[str, Any], restarts: bool) -> None:
        self.folder = result.with_name(f"{result.name}.parts")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise InvalidArgument(f"another headrace batch writes '{result}'") from None
        if restarts:
            for part in self.folder.glob("*.arrow"):
                part.unlink()
            (self.folder / _JOB).unlink(missing_ok=True)
        self._check(job)

    def _check(self, job: Mapping[str, Any]) -> None:
        file = self.folder / _JOB
        if not file.exists():
            _replace(file, lambda stream: stream.write(json.dumps(job, indent=1).encode()))
            return
        former = json.loads(file.read_text())
        if changed := [name for name in job if former.get(name) != job[name]]:
            name = changed[0]
            self.close()
            raise InvalidArgument(
                f"'{self.folder}' is of a job with another {name}: {former.get(name)!r}, now {job[name]!r}; "
                "--restart begins anew"
            )

    def has(self, number: int) -> bool:
        return self._path(number).exists()

    def write(self, number: int, batch: pa.RecordBatch) -> None:
        def write(stream: IO[bytes]) -> None:
            with pa.ipc.new_file(stream, batch.schema) as writer:
                writer.write_batch(batch)

        _replace(self._path(number), write)

    def read(self, count: int) -> Iterator[pa.RecordBatch]:
        """Yield the first ``count`` parts."""
        for number in range(count):
            with pa.memory_map(str(self._path(number))) as source:
                yield from map(pa.ipc.open_file(source).get_batch, range(1))

    def errors(self, number: int) -> int:
        """Return how many rows of a part have failed."""
        with pa.memory_map(str(self._path(number))) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
            return int(len(batch) - batch["error"].null_count)

    def close(self) -> None:
        self._lock.close()

    def remove(self) -> None:
        self.close()
        shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.arrow"


def check_columns(path: Path, schema: pa.Schema) -> None:
    """Raise `InvalidArgument` if a file with the ending of ``path`` cannot have these columns."""
    write = WRITERS[path.suffix.lower()]
    if write is _write_numpy:  # its only output is checked by name
        return
    try:
        write(io.BytesIO(), schema, iter(()), 0)
    except pa.ArrowException as error:
        raise InvalidArgument(
            f"a {path.suffix} file cannot have the columns of '{path}': {error}; choose the columns by --keep"
        ) from error


def write_result(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch], rows: int) -> None:
    """Write the file ``path`` atomically, in the format of its ending."""
    write = WRITERS[path.suffix.lower()]
    copied = [each.name for each in schema if each.metadata and COPIED_JSON.items() <= each.metadata.items()]
    if copied and write is not _write_json:
        schema = pa.schema([each.remove_metadata() for each in schema])
        batches = (_plain_text(batch, copied) for batch in batches)
    _replace(path, lambda stream: write(stream, schema, batches, rows))


def _plain_text(batch: pa.RecordBatch, names: Collection[str]) -> pa.RecordBatch:
    """Return the rows with copied JSON strings as text. Other JSON values stay JSON."""
    for name in names:
        found = [None if each is None else json.loads(each) for each in batch[name].to_pylist()]
        texts = [each if each is None or isinstance(each, str) else json.dumps(each) for each in found]
        place = batch.schema.get_field_index(name)
        batch = batch.set_column(place, name, pa.array(texts, pa.string()))
    return batch


def _write_parquet(stream: IO[bytes], schema: pa.Schema, batches: Iterator[pa.RecordBatch], rows: int) -> None:
    """Write row groups of at least 131,072 rows or 64 MiB, which readers prefer to the rows of one part."""
    with pa.parquet.ParquetWriter(stream, schema) as writer:
        pending: list[pa.RecordBatch] = []
        for batch in batches:
            pending.append(batch)
            if sum(map(len, pending)) >= _GROUP_ROWS or sum(each.nbytes for each in pending) >= _GROUP_BYTES:
                writer.write_table(pa.Table.from_batches(pending))
                pending = []
        if pending:
            writer.write_table(pa.Table.from_batches(pending))


def _write_arrow(stream: IO[bytes], schema: pa.Schema, batches: Iterator[pa.RecordBatch], rows: int) -> None:
    with pa.ipc.new_file(stream, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _write_csv(stream: IO[bytes], schema: pa.Schema, batches: Iterator[pa.RecordBatch], rows: int) -> None:
    """CSV has no lists and no structs: they are written as JSON."""
    is_nested = pa.types.is_nested
    flat = pa.schema([pa.field(each.name, pa.string() if is_nested(each.type) else each.type) for each in schema])
    with pa.csv.CSVWriter(stream, flat) as writer:
        for batch in batches:
            columns = [
                pa.array([None if each is None else _json(each) for each in column.to_pylist()], pa.string())
                if is_nested(column.type)
                else column
                for column in batch.columns
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=flat))


def _write_json(stream: IO[bytes], schema: pa.Schema, batches: Iterator[pa.RecordBatch], rows: int) -> None:
    copied = {each.name for each in schema if each.metadata}
    for batch in batches:
        for row in batch.to_pylist():
            for name in copied:
                row[name] = None if row[name] is None else json.loads(row[name])
            if row["error"] is None:
                del row["error"]
            stream.write(_json(row).encode() + b"\n")


def _write_numpy(stream: IO[bytes], schema: pa.Schema, batches: Iterator[pa.RecordBatch], rows: int) -> None:
    """Write the only output as an array. It has the same shape in all rows, and no row has failed."""
    (name,) = [each.name for each in schema if each.name != "error"]
    has_header = False
    for batch in batches:
        column = batch[name]
        shape: tuple[int, ...] = (len(batch),)
        while is_list(column.type):
            column, shape = column.flatten(), (*shape, column.type.list_size)
        piece = column.to_numpy(zero_copy_only=False).reshape(shape)
        if not has_header:
            header = {"descr": np.lib.format.dtype_to_descr(piece.dtype), "fortran_order": False}
            np.lib.format.write_array_header_2_0(stream, {**header, "shape": (rows, *shape[1:])})
            has_header = True
        stream.write(piece.tobytes())


#: The writers of files by their ending.
WRITERS: dict[str, Callable[[IO[bytes], pa.Schema, Iterator[pa.RecordBatch], int], None]] = {
    ".parquet": _write_parquet,
    ".arrow": _write_arrow,
    ".csv": _write_csv,
    ".jsonl": _write_json,
    ".npy": _write_numpy,
}


def _json(value: Any) -> str:
    """Return ``value`` as JSON. NaN and the infinities, which JSON has not, are null, which all readers take."""
    try:
        return json.dumps(value, ensure_ascii=False, default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, default=_plain)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _plain(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file beside ``path``, and rename it to ``path`` when it is on the disk."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as stream:
        write(stream)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)
