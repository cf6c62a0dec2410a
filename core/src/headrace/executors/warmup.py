"""The requests of a config's ``model_warmup``, and their execution without an event loop.

Source: docs/spec/behaviours.md section 4.10.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from headrace.config.model_config_pb2 import ModelConfig, ModelWarmup
from headrace.config.path_checks import why_path_leaves
from headrace.config.regular_files import read_regular
from headrace.config.validation.instances import NO_ID
from headrace.errors import ConfigError, HeadraceError, InternalError, LoadError, Rescheduled
from headrace.executors.runner import LATER, Runner
from headrace.messages import dtypes
from headrace.messages.dtypes import DataType
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.tensor import BytesTensor, Tensor
from headrace.messages.ticket import Ticket


def complete(runner: Runner, batch: Sequence[Ticket]) -> Sequence[Answer]:
    """Run ``batch`` to its end. Return the last response or error of each request; None if there was none.

    On the instance's thread.
    """
    collector = _Collector()
    runner.connect(collector)
    answers, _ = runner.run(batch)
    return [
        collector.last(ticket, collector.wait(ticket) if answer is LATER else answer)
        for ticket, answer in zip(batch, answers, strict=True)
    ]


class _Collector:
    """A `headrace.executors.runner.AnswerSink` that reads responses at once."""

    def __init__(self) -> None:
        self._responses: dict[Ticket, Answer] = {}
        self._ended: dict[Ticket, Answer] = {}
        self._arrivals: SimpleQueue[tuple[Ticket, Answer]] = SimpleQueue()

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        if final:
            self._arrivals.put((ticket, answer))
        else:
            self._responses[ticket] = answer
            ticket.read()

    def wait(self, ticket: Ticket) -> Answer:
        """Return the last answer to ``ticket``. Blocks until it arrives."""
        while ticket not in self._ended:
            arrived, answer = self._arrivals.get()
            self._ended[arrived] = answer
        return self._ended[ticket]

    def last(self, ticket: Ticket, answer: Answer) -> Answer:
        return self._responses.get(ticket) if answer is None else answer


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """One warm-up batch: ``tickets`` are executed together, ``count`` times."""

    name: str
    count: int
    tickets: tuple[Ticket, ...]

    def log_iteration(self, instance: str, iteration: int) -> None:
        """Log that ``instance`` is about to execute this; ``iteration`` counts from 1."""
        model = self.tickets[0].request.model_name
        text = "model '%s' instance %s is running warmup sample '%s' for iteration %d"
        log.debug(text, model, instance, self.name, iteration, extra={"model": model})

    def run(self, runner: Runner, instance: str = "") -> None:
        """Execute on ``instance``. Raises `InternalError` with the sample's name if any request fails."""
        for number in range(self.count):
            self.log_iteration(instance, number + 1)
            for answer in complete(runner, self.tickets):
                if isinstance(answer, HeadraceError) and not isinstance(answer, Rescheduled):
                    raise InternalError(f"failed to run warmup sample '{self.name}': {answer.message}; ")


def read_samples(config: ModelConfig, model_path: Path) -> list[WarmupSample]:
    """Return the samples of ``config``, which is validated. Samples with batch size 0 are left out.

    Raises `LoadError` for a data file that cannot be read or is too short.
    """
    return [_sample(config, setting, model_path) for setting in config.model_warmup if setting.batch_size]


def prepare(samples: Iterable[WarmupSample], inputs: Collection[str], check: Callable[[Ticket], None]) -> None:
    """Check each request with ``check`` like a client's, and reshape its ``inputs`` like a client's.

    Tensors that are not inputs of the config are added afterwards, as in Triton: they stand for what a scheduler adds.
    Raises `ConfigError` with the sample's name if ``check`` raises.
    """
    for sample in samples:
        for ticket in sample.tickets:
            tensors = ticket.request.inputs
            ticket.request = ticket.request.with_inputs({name: tensors[name] for name in tensors if name in inputs})
            others = {name: tensors[name] for name in tensors if name not in inputs}
            try:
                check(ticket)
            except HeadraceError as error:
                model, reason = ticket.request.model_name, error.message.removeprefix(NO_ID)
                unknown = f" No input of the model: {', '.join(map(repr, sorted(others)))}." * bool(others)
                message = f"warmup sample '{sample.name}' of model '{model}': {reason}{unknown}"
                raise ConfigError(message, error.code, field="model_warmup") from error
            ticket.request = ticket.request.with_inputs({**ticket.request.inputs, **others})


def _sample(config: ModelConfig, setting: ModelWarmup, model_path: Path) -> WarmupSample:
    batched = config.max_batch_size > 0
    inputs = {
        name: _tensor(name, described, batched, model_path / "warmup") for name, described in setting.inputs.items()
    }
    number = setting.batch_size if batched else 1
    tickets = tuple(Ticket(InferRequest(config.name, inputs), _ignore) for _ in range(number))
    return WarmupSample(setting.name, max(1, setting.count), tickets)


def _tensor(name: str, described: ModelWarmup.Input, batched: bool, folder: Path) -> Tensor:
    datatype = dtypes.BY_CONFIG_VALUE[described.data_type]
    shape = (1, *described.dims) if batched else tuple(described.dims)
    source = described.WhichOneof("input_data_type")
    if source == "input_data_file":
        return _from_file(folder, described.input_data_file, datatype, shape)
    if datatype is dtypes.BYTES:
        return BytesTensor(bytes(4 * prod(shape)), shape)
    if source == "random_data":
        size = prod(shape) * datatype.itemsize
        below = 2 if datatype is dtypes.BOOL else 0x7C  # bytes that give neither infinity nor NaN, not even in FP16
        raw = np.random.default_rng(0).integers(0, below, size, np.uint8)
        return raw.view(datatype.numpy).reshape(shape)
    return np.zeros(shape, datatype.numpy)


def _from_file(folder: Path, name: str, datatype: DataType, shape: tuple[int, ...]) -> Tensor:
    if why_path_leaves(name):
        raise LoadError(f"warmup data file '{name}' is outside '{folder}'")
    path = folder / posixpath.normpath(name)  # resolves `..` before links are followed
    try:
        data = read_regular(path)
    except OSError as error:
        raise LoadError(f"cannot read warmup data file '{path}': {error.strerror}") from error
    if datatype is dtypes.BYTES:
        return BytesTensor(data, shape)
    expected = prod(shape) * datatype.itemsize
    if len(data) < expected:
        raise LoadError(
            f"{NO_ID}warmup setting expects {expected} bytes, but the data provided from {name}"  # no space, as Triton
            f"only has {len(data)} bytes"
        )
    return np.frombuffer(data, datatype.numpy, prod(shape)).reshape(shape)


def _ignore(answer: Answer, final: bool) -> None:
    """Do nothing: warm-up has no caller, and reads the runner's return value instead."""
