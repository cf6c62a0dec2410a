"""One job: reads chunks, infers several at a time, writes each as a part, and joins the parts to the result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from headrace import InvalidArgument, ModelView, Server, ServerOptions
from headrace_batch.column_mapping import ColumnMapping, copied_fields
from headrace_batch.result_files import COPIED_JSON, WRITERS, ResultParts, check_columns, write_result
from headrace_batch.row_files import ARRAY, Chunk, Column, RowFile, open_rows
from headrace_batch.row_inference import Piece, RowInference

#: Chunks in memory at a time: one is read or written while another is inferred.
_CHUNKS = 3


@dataclass(frozen=True)
class BatchJob:
    """The settings of a run. ``inputs`` maps inputs to patterns of columns; empty ``outputs`` are all."""

    repository: Sequence[str]
    model: str
    source: Path
    result: Path
    inputs: Mapping[str, str]
    outputs: Sequence[str]
    keep: Sequence[str] | None
    version: str = ""
    in_flight: int = 0
    chunk_rows: int = 4096
    stops_at_error: bool = False
    overwrites: bool = False
    restarts: bool = False


@dataclass
class JobProgress:
    """Rows that are in the parts, and how many of them have failed. ``total`` is None if it is not known yet."""

    rows: int = 0
    errors: int = 0
    total: int | None = None
    #: Rows of parts that an earlier run has written.
    resumed: int = 0
    #: The number of the first row that failed, from 1, and why; in this run.
    first_error: tuple[int, str] | None = None


async def run(job: BatchJob, report: Callable[[JobProgress], None]) -> JobProgress:
    """Infer all rows and write the result. ``report`` is called after each part. Raises `HeadraceError`."""
    if job.result.suffix.lower() not in WRITERS:
        raise InvalidArgument(f"'{job.result}' ends in '{job.result.suffix}'; the endings are {', '.join(WRITERS)}")
    if job.result.exists() and not job.overwrites:
        raise InvalidArgument(f"'{job.result}' exists; --overwrite replaces it")
    source = open_rows(job.source)
    options = ServerOptions(
        model_repository=tuple(job.repository), model_control_mode="explicit", load_model=(job.model,)
    )
    async with Server(options) as server:
        model = server.engine.resolve(job.model, job.version)
        try:
            return await _Run(job, source, server, model, report).finish()
        except (OSError, pa.ArrowException) as error:  # errors of the source name the place
            reason = getattr(error, "strerror", None) or error
            raise InvalidArgument(f"cannot write '{job.result}': {reason}") from error


class _Run:
    def __init__(
        self, job: BatchJob, source: RowFile, server: Server, model: ModelView, report: Callable[[JobProgress], None]
    ) -> None:
        if model.decoupled:
            raise InvalidArgument(f"model '{model.name}' is decoupled: it has any number of answers for a row")
        for name in job.outputs:
            if name not in model.outputs:
                raise InvalidArgument(f"model '{model.name}' has no output '{name}'; it has {', '.join(model.outputs)}")
        self._job, self._source, self._report = job, source, report
        mapping = ColumnMapping(model, job.inputs, list(source.columns))
        instances = len(server.served(model.name, model.version)[0].executors)
        self._inference = RowInference(server, model, mapping, job.outputs, job.in_flight or 2 * max(1, instances))
        self._mapping = mapping
        self._schema: pa.Schema | None = None
        self._check_array(model)
        self._parts = ResultParts(job.result, self._identity(model), job.restarts)
        self._progress = JobProgress(total=source.total)

    def _check_array(self, model: ModelView) -> None:
        """A NumPy file has one array: one output of one shape."""
        if self._job.result.suffix.lower() != ".npy":
            return
        outputs = self._inference.outputs
        if len(outputs) != 1:
            raise InvalidArgument(f"a NumPy file has one output; choose one by --outputs: {', '.join(outputs)}")
        ((name, spec),) = outputs.items()
        if -1 in spec.dims or spec.datatype.name == "BYTES":
            raise InvalidArgument(f"output '{name}' has {spec.datatype} {list(spec.dims)}, which no NumPy file holds")

    def _identity(self, model: ModelView) -> Mapping[str, Any]:
        """The settings that a run must share with the run that it continues."""
        job, state = self._job, self._job.source.stat()
        return {
            "input": str(job.source.absolute()),
            "size": state.st_size,
            "time": state.st_mtime_ns,
            "model": model.name,
            "version": model.version,
            "map": dict(job.inputs),
            "outputs": list(job.outputs),
            "keep": None if job.keep is None else list(job.keep),
            "chunk": job.chunk_rows,
        }

    async def finish(self) -> JobProgress:
        chunks, done = self._source.chunks(self._job.chunk_rows), 0
        running: list[asyncio.Task[None]] = []
        try:
            while (chunk := await self._next(chunks)) is not None:
                done += 1
                self._schema = self._schema or self._schema_of(chunk)
                chunk = self._without_lost_columns(chunk)
                if self._parts.has(chunk.number):
                    self._count(chunk.count, self._parts.errors(chunk.number), resumed=True)
                    continue
                running.append(asyncio.create_task(self._infer(chunk)))
                if len(running) == _CHUNKS:
                    running = await _wait_for_one(running)
            while running:
                running = await _wait_for_one(running)
            self._progress.total = self._progress.rows
            await asyncio.to_thread(self._write, done)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._parts.close()
        return self._progress

    async def _next(self, chunks: Iterator[Chunk]) -> Chunk | None:
        try:
            return await asyncio.to_thread(next, chunks, None)
        except (OSError, pa.ArrowException) as error:
            raise InvalidArgument(f"row {self._progress.rows + 1} or later of '{self._job.source}': {error}") from error

    async def _infer(self, chunk: Chunk) -> None:
        pieces, broken = await self._inference.infer(chunk)
        if broken and (self._job.stops_at_error or self._job.result.suffix.lower() == ".npy"):
            row = min(broken)
            raise InvalidArgument(f"row {chunk.first + row + 1}: {broken[row]}")
        batch = await asyncio.to_thread(self._batch, chunk, pieces, broken)
        await asyncio.to_thread(self._parts.write, chunk.number, batch)
        self._count(chunk.count, len(broken))
        if broken:
            first = (chunk.first + min(broken) + 1, broken[min(broken)])
            self._progress.first_error = min(first, self._progress.first_error or first)

    def _count(self, rows: int, errors: int, resumed: bool = False) -> None:
        self._progress.rows += rows
        self._progress.errors += errors
        self._progress.resumed += rows if resumed else 0
        self._report(self._progress)

    def _schema_of(self, chunk: Chunk) -> pa.Schema:
        names = [name for name in (self._source.columns or chunk.columns) if name != ARRAY]
        if self._job.keep is None:
            copied = self._mapping.others(names) if names else []
        else:
            copied = list(self._job.keep)
            if self._source.columns and (missing := [name for name in copied if name not in names]):
                raise InvalidArgument(f"--keep names column '{missing[0]}'; the file has {', '.join(names)}")
        if clash := [name for name in copied if name in {*self._inference.outputs, "error"}]:
            raise InvalidArgument(f"column '{clash[0]}' has the name of an output: choose the columns by --keep")
        fields = copied_fields(copied, self._source.columns)
        if not self._source.columns:  # any JSON value
            fields = pa.schema([each.with_metadata(COPIED_JSON) for each in fields])
        schema = self._inference.schema(fields)
        check_columns(self._job.result, schema)
        return schema

    def _without_lost_columns(self, chunk: Chunk) -> Chunk:
        """Return the chunk. A line of JSON with a column that would not be copied is broken."""
        assert self._schema is not None
        if self._source.columns or self._job.keep is not None:
            return chunk
        broken = dict(chunk.broken)
        for name in self._mapping.others(chunk.columns, is_first=False):
            if name not in self._schema.names:
                why = (
                    f"no row of the first chunk has column '{name}', so it would be lost: choose the columns by --keep"
                )
                broken |= {row: why for row, value in enumerate(chunk.columns[name]) if value is not None}
        return replace(chunk, broken=broken)

    def _batch(self, chunk: Chunk, pieces: Sequence[Piece], broken: Mapping[int, str]) -> pa.RecordBatch:
        assert self._schema is not None
        columns = self._inference.columns(pieces, chunk.count)
        columns["error"] = pa.array([broken.get(row) for row in range(chunk.count)], pa.string())
        for each in self._schema:
            if each.name not in columns:
                columns[each.name] = _copied(chunk.columns.get(each.name), chunk.count)
        return pa.RecordBatch.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)

    def _write(self, parts: int) -> None:
        schema = self._schema
        if schema is None:
            raise InvalidArgument(f"'{self._job.source}' has no rows")
        if self._job.result.suffix.lower() == ".npy":
            schema = pa.schema([each for each in schema if each.name in self._inference.outputs])
        write_result(self._job.result, schema, self._parts.read(parts), self._progress.rows)
        self._parts.remove()


async def _wait_for_one(running: list[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    """Wait for one of the tasks, which are in the order of the file. Return the others. Raises what the first of all
    tasks that have failed raised."""
    done, left = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    if any(task.exception() for task in done):
        for task in running:
            await task
    return [task for task in running if task in left]


def _copied(column: Column | None, count: int) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    values = [None] * count if column is None else column
    return pa.array([None if each is None else json.dumps(each) for each in values], pa.string())
