"""A server with tiny models, for the tests of a module, and its answers."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
import pytest

from headrace import BytesTensor, InferRequest, InferResponse, Server

T = TypeVar("T")
#: Asks a model that generates text, in a stream if ``stream``: the text, tokens and finish reason.
Ask = Callable[..., "Given"]


class Given:
    """What a caller got."""

    def __init__(self, responses: Sequence[InferResponse]) -> None:
        self.responses = responses
        self.parts = [self.string("text_output", each) for each in responses]
        self.text = "".join(self.parts)
        self.reason = self.string("finish_reason", responses[-1])
        self.ids = [int(token) for each in responses for token in np.asarray(each.outputs["output_ids"]).tolist()]

    def string(self, name: str, response: InferResponse | None = None) -> str:
        tensor = (response or self.responses[-1]).outputs[name]
        assert isinstance(tensor, BytesTensor)
        return b"".join(tensor.items()).decode()


class Loop:
    """An event loop on a thread of its own, with a server on it."""

    def __init__(self, repository: Path, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = Server(repository, exit_timeout_secs=10, **options)

    def run(self, awaited: Coroutine[Any, Any, T], timeout: float = 60) -> T:
        return asyncio.run_coroutine_threadsafe(awaited, self._loop).result(timeout)

    def close(self) -> None:
        self.run(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def ask(self, model: str, prompt: Any, *asked: str, sampling: Any = None, **inputs: Any) -> Given:
        """``prompt`` is text, tokens, or messages; ``asked`` are inputs that are true."""
        if isinstance(prompt, str):
            sent: dict[str, Any] = {"text_input": strings(prompt)}
        elif isinstance(prompt[0], int):
            sent = {"input_ids": np.array(prompt, np.int32)}
        else:
            sent = {"messages": strings(orjson.dumps(prompt))}
        flags = {"exclude_input_in_output", "return_finish_reason", "return_output_ids", *asked}
        sent |= {name: np.array([True]) for name in flags}
        sent |= {name: strings(orjson.dumps(value)) for name, value in inputs.items()}
        if sampling is not None:
            sent["sampling_parameters"] = strings(orjson.dumps(sampling))
        return Given([each async for each in self.server.engine.responses(InferRequest(model, sent))])


def strings(*items: str | bytes) -> BytesTensor:
    return BytesTensor.from_items([each.encode() if isinstance(each, str) else each for each in items], (len(items),))


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> Iterator[None]:
    """Freeze what exists, as `headrace serve` does: each unload collects, and other tests leave much to look at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def start_server() -> Iterator[Callable[..., Loop]]:
    started = []

    def start(repository: Path, **options: Any) -> Loop:
        loop = Loop(repository, **options)
        started.append(loop)
        loop.run(loop.server.start())
        return loop

    yield start
    for loop in started:
        loop.close()


@pytest.fixture(scope="module")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a model: ``make(folder)`` makes the version. Returns the folder of the version."""

    def write(
        repository: Path, name: str, make: Callable[[Path], Path], kind: str = "KIND_CPU", **parameters: str
    ) -> Path:
        lines = [
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
        ]
        version = repository / name / "1"
        version.mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(
            "\n".join([f'backend: "transformers" instance_group {{ kind: {kind} }}', *lines])
        )
        make(version)
        return version

    return write
