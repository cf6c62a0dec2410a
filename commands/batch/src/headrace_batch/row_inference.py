"""Infers the rows of a chunk in requests of the model's batch size, several in flight at a time.

If a request of several rows fails, each of its rows is sent alone, so that a wrong row fails no other. A row is sent
twice if the model is not available, for example because its process has crashed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from headrace import Code, HeadraceError, InferResponse, ModelView, Server, Spec
from headrace_batch.arrow_types import column_type
from headrace_batch.column_mapping import ColumnMapping
from headrace_batch.row_files import Chunk
from headrace_batch.tensor_columns import Array, RowTensors, column_of, decoded, tensors_of

#: Rows by their place in a chunk, and each output for them, `[rows, ...]`.
Piece: TypeAlias = "tuple[Sequence[int], list[Array]]"

#: The delay before the second try of a row.
PAUSE_S = 2.0


class RowInference:
    """The requests to one version of a model. Event loop only, except for `columns`."""

    def __init__(
        self, server: Server, model: ModelView, mapping: ColumnMapping, outputs: Sequence[str], in_flight: int
    ) -> None:
        self._server, self._model, self._mapping = server, model, mapping
        self._outputs = {name: model.outputs[name] for name in outputs or model.outputs}
        self._free = asyncio.Semaphore(in_flight)

    def schema(self, copied: pa.Schema) -> pa.Schema:
        """Return the columns of the result: the ``copied`` ones, the outputs, and `error`."""
        outputs = [pa.field(name, column_type(spec.datatype.name, spec.dims)) for name, spec in self._outputs.items()]
        return pa.schema([*copied, *outputs, pa.field("error", pa.string())])

    async def infer(self, chunk: Chunk) -> tuple[list[Piece], dict[int, str]]:
        """Return the answers in the order of the rows, and the errors of the others by their place in the chunk."""
        inputs, broken = await asyncio.to_thread(self._tensors, chunk)
        pieces: list[Piece] = []

        async def ask(rows: Sequence[int]) -> None:
            try:
                async with self._free:
                    pieces.append((rows, await self._ask(inputs, rows)))
            except (HeadraceError, UnicodeDecodeError) as error:
                if len(rows) == 1:
                    broken[rows[0]] = (
                        error.message if isinstance(error, HeadraceError) else f"an output is no text: {error}"
                    )
                else:
                    for row in rows:
                        await ask((row,))

        await asyncio.gather(*map(ask, self._groups(inputs, chunk.count, broken)))
        pieces.sort(key=lambda piece: piece[0][0])
        return pieces, broken

    def columns(self, pieces: Sequence[Piece], count: int) -> dict[str, pa.Array]:
        """Return the outputs of a chunk as columns."""
        return {
            name: column_of([(rows, outputs[place]) for rows, outputs in pieces], count, spec.datatype.name, spec.dims)
            for place, (name, spec) in enumerate(self._outputs.items())
        }

    @property
    def outputs(self) -> Mapping[str, Spec]:
        return self._outputs

    def _tensors(self, chunk: Chunk) -> tuple[Mapping[str, RowTensors], dict[int, str]]:
        broken = dict(chunk.broken)
        inputs = {}
        for name, columns in self._mapping.columns(chunk).items():
            inputs[name] = tensors_of(columns, self._model.inputs[name], broken)
        return inputs, broken

    def _groups(
        self, inputs: Mapping[str, RowTensors], count: int, broken: Mapping[int, str]
    ) -> Iterator[Sequence[int]]:
        """Yield the rows of each request: at most the batch size of the model, all of one shape."""
        most = max(1, self._model.max_batch_size)
        if not broken and all(tensors.is_even for tensors in inputs.values()):
            yield from (range(first, min(first + most, count)) for first in range(0, count, most))
            return
        group: list[int] = []
        shapes: object = None
        for row in range(count):
            if row in broken:
                continue
            found = [tensors.shape(row) for tensors in inputs.values()]
            if group and (len(group) == most or found != shapes):
                yield group
                group = []
            group.append(row)
            shapes = found
        if group:
            yield group

    async def _ask(self, inputs: Mapping[str, RowTensors], rows: Sequence[int]) -> list[Array]:
        """Return each output for ``rows``, ``[rows, ...]``."""
        values = {name: tensors.stack(rows) for name, tensors in inputs.items()}
        has_batch = self._model.max_batch_size > 0
        if not has_batch:
            values = {name: tensor[0] for name, tensor in values.items()}
        try:
            response = await self._infer(values)
        except HeadraceError as error:
            if error.code is not Code.UNAVAILABLE or len(rows) > 1:
                raise
            await asyncio.sleep(PAUSE_S)
            response = await self._infer(values)
        found = [decoded(response.outputs[name]) for name in self._outputs]
        return found if has_batch else [output[np.newaxis] for output in found]

    async def _infer(self, inputs: Mapping[str, Any]) -> InferResponse:
        model = self._model
        return await self._server.infer_async(model.name, inputs, version=model.version, outputs=tuple(self._outputs))
