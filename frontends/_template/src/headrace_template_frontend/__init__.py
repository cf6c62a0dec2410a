"""The frontend template: a port that is asked by lines of JSON, and answers each with a line per response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from headrace import (
    Caller,
    Engine,
    Frontend,
    HeadraceError,
    InferRequest,
    InvalidArgument,
    OptionGroup,
    Unavailable,
    hookimpl,
)


@dataclass(frozen=True)
class TemplateOptions(OptionGroup):
    """A port that is asked by lines of JSON."""

    name: ClassVar[str] = "template"
    enabled: bool = field(default=False, metadata={"help": "Listen."})
    address: str = field(default="localhost", metadata={"help": "Address to listen on."})
    port: int = field(default=8004, metadata={"help": "Port; 0 takes a free one."})
    max_line_bytes: int = field(default=1 << 20, metadata={"help": "The longest line that is read."})


class TemplateFrontend(Frontend):
    name = "template"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.options = engine.options.group(TemplateOptions)
        self._callers: dict[asyncio.Task[None], asyncio.StreamReader] = {}

    @property
    def enabled(self) -> bool:
        return self.options.enabled

    async def start(self) -> None:
        address, port = self.options.address, self.options.port
        try:
            self._listener = await asyncio.start_server(self._begin, address, port, limit=self.options.max_line_bytes)
        except OSError as error:
            raise Unavailable(f"template: cannot listen on {address}:{port}: {error}") from error

    async def stop(self) -> None:
        self._listener.close()
        for reader in self._callers.values():
            reader.feed_eof()  # what was sent before is still read, and answered
        try:
            await asyncio.gather(*self._callers)
        finally:
            for task in self._callers:
                task.cancel()

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._callers[task] = reader
        task.add_done_callback(self._callers.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = Caller("template", writer.get_extra_info("peername")[0])
        try:
            while line := await reader.readline():
                async for answer in self._answer(line, caller):
                    writer.write(json.dumps(answer).encode() + b"\n")
                    await writer.drain()  # a client that does not read stops the model
        except (ConnectionError, ValueError):  # gone, or a line without an end
            pass
        finally:
            writer.close()

    async def _answer(self, line: bytes, caller: Caller) -> AsyncIterator[dict[str, object]]:
        try:
            async for response in self.engine.responses(self._read(line), caller):
                yield {name: np.asarray(tensor).tolist() for name, tensor in response.outputs.items()}
        except HeadraceError as error:
            yield {"error": error.message}

    def _read(self, line: bytes) -> InferRequest:
        try:
            asked = json.loads(line)
            specs = self.engine.resolve(asked["model"]).inputs
            given = {name: np.asarray(value, specs[name].datatype.numpy) for name, value in asked["inputs"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"a line is JSON with 'model' and 'inputs': {error!r}") from error
        return InferRequest(asked["model"], given)


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [TemplateOptions]


@hookimpl
def register_frontends() -> list[type[Frontend]]:
    return [TemplateFrontend]
