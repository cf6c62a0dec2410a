"""What a backend author implements.

The smallest backend is one class with ``name`` and ``load``, and one instance class with
``execute``; `penstock.backends.identity` is a complete example. An instance stands on one of
three rungs, and which one is decided once, at load, by its base class:

1. `Instance`: ``execute(tensors) -> tensors``. Rows in, rows out. Core stacks the rows of many
   requests, splits the answers, and checks names, dtypes and shapes on both sides.
2. `RequestInstance`: ``execute_requests(requests) -> answers``. For ragged inputs, request
   parameters and an error per request.
3. `StreamInstance`: ``stream(request) -> iterator of responses``. For decoupled answers.

``load`` and all methods of an instance run on that instance's own thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from penstock.config.model_config_pb2 import ModelConfig
from penstock.errors import LoadError, PenstockError
from penstock.messages import dtypes
from penstock.messages.dtypes import DataType
from penstock.messages.request import InferRequest
from penstock.messages.response import InferResponse
from penstock.messages.tensor import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
DeviceKind: TypeAlias = Literal["cpu", "gpu", "model"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where an instance runs. ``id`` counts GPUs from 0, and is 0 elsewhere."""

    kind: DeviceKind = "cpu"
    id: int = 0


@dataclass(frozen=True, slots=True)
class NoParameters:
    """The ``Parameters`` of a backend that takes none: the config's map passes unread."""


@dataclass(frozen=True, slots=True)
class Model:
    """One version of a model, as its backend sees it.

    ``path`` is the version's directory. ``config`` is the parsed ``config.pbtxt`` and must not be
    changed, except by ``Backend.complete_config``. ``parameters`` is an instance of the backend's
    ``Parameters``. ``shared`` is what ``Backend.share`` returned. ``instance_name`` and ``device``
    describe the instance being loaded; during ``complete_config`` and ``share`` they are empty.
    """

    name: str
    version: int
    path: Path
    config: ModelConfig
    parameters: Any = NoParameters()
    shared: Any = None
    instance_name: str = ""
    device: Device = field(default_factory=Device)

    @property
    def max_batch_size(self) -> int:
        return self.config.max_batch_size

    def file(self, default: str) -> Path:
        """The model's file: ``default_model_filename`` if the config sets it, else ``default``.

        Raises `LoadError` naming the path if there is none, or if it leaves the model directory.
        """
        return self.resource(self.config.default_model_filename or default)

    def resource(self, relative: str) -> Path:
        """``relative`` inside the version's directory, under the rules of `file`."""
        path = self.path / relative
        root = self.path.parent.resolve()
        if not path.resolve().is_relative_to(root):
            raise LoadError(f"file '{relative}' of model '{self.name}' is outside the model directory")
        if not path.exists():
            raise LoadError(f"no file '{path}' for model '{self.name}' version {self.version}")
        return path


class Backend(ABC):
    """Loads models of one kind. One object per server, made when a model first needs it.

    ``name`` is what ``backend:`` says in a config. ``Parameters`` is a frozen dataclass with
    defaults; core fills it from the config's ``parameters`` (str, int, float and bool fields) and
    an unknown key is a `ConfigError` that lists the known ones. Import the engine inside ``load``.
    """

    name: ClassVar[str]
    Parameters: ClassVar[type] = NoParameters
    #: Kinds of device that an instance can run on, most preferred first.
    devices: ClassVar[tuple[DeviceKind, ...]] = ("cpu",)
    dtypes: ClassVar[tuple[DataType, ...]] = dtypes.ALL
    #: Instances of a CPU group whose config gives no count.
    default_cpu_instances: ClassVar[int] = 1

    def __init__(self, options: Mapping[str, str]) -> None:
        """``options`` are the ``--backend-config=<name>,key=value`` settings."""
        self.options = options

    @abstractmethod
    def load(self, model: Model) -> AnyInstance:
        """One instance of ``model`` on ``model.device``; called on the instance's thread.

        Raises `LoadError` naming the file or the setting at fault.
        """

    def complete_config(self, model: Model) -> None:
        """Fill what ``model.config`` leaves out, in place: ``max_batch_size``, ``input``,
        ``output``, a scheduling choice, ``model_transaction_policy``. Not called when
        auto-completion is off. Raises `LoadError` or `ConfigError`."""

    def share(self, model: Model) -> Any:
        """Something that the instances of one version use together (weights, an engine)."""
        return None

    def unshare(self, shared: Any) -> None:
        """Release what `share` returned; called after the last instance has closed."""


class BaseInstance:
    """The defaulted neighbours that all three rungs have in common."""

    def warm_up(self) -> None:
        """Make the first request as fast as the second. Called once, before the model is ready."""

    def is_ready(self) -> bool:
        """False takes the model out of readiness. Must not block; may be called on any thread."""
        return True

    def close(self) -> None:
        """Release everything; no other method is called afterwards."""


class Instance(BaseInstance, ABC):
    """Rung 1: stateless rows."""

    @abstractmethod
    def execute(self, inputs: Tensors) -> Tensors:
        """``inputs`` and the result map names to tensors that share the first axis, the rows of
        the batch (no batch axis if ``max_batch_size`` is 0). Do not write to the inputs, and do
        not reuse an output's buffer. A raise leaves the instance in use: the requests of the batch
        are executed again, one by one, and the one that raises alone fails; raise `PenstockError`
        to choose the code."""


class RequestInstance(BaseInstance, ABC):
    """Rung 2: the requests of a batch, one by one."""

    @abstractmethod
    def execute_requests(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | PenstockError]:
        """One answer per request, in order. A raise fails the whole batch."""


class StreamInstance(BaseInstance, ABC):
    """Rung 3: any number of responses per request."""

    @abstractmethod
    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        """The responses, as they become available. ``request.cancelled`` is looked at between
        them, and closes the iterator. A raise ends the request with an error."""


AnyInstance: TypeAlias = Instance | RequestInstance | StreamInstance
