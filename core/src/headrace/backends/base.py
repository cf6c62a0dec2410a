"""What a backend author implements.

The smallest backend is one class with ``name`` and ``load``, and one instance class with
``execute``; `headrace.backends.identity` is a complete example. An instance stands on one of
four rungs, and which one is decided once, at load, by its base class:

1. `Instance`: ``execute(tensors) -> tensors``. Rows in, rows out. Core stacks the rows of many
   requests, splits the answers, and checks names, dtypes and shapes on both sides.
2. `RequestInstance`: ``execute_requests(requests) -> answers``. For ragged inputs, request
   parameters and an error per request. From here on, the shapes of outputs are the instance's matter.
3. `StreamInstance`: ``stream(request) -> iterator of responses``. For decoupled answers.
4. `DeferredInstance`: ``accept(calls)``. For answers at any time and from any thread.

``load`` and all methods of an instance but ``is_ready`` run on that instance's own thread, in the
server's process or in one of the instance's own (`Isolation`). One of the first two rungs that says so
(``BaseInstance.any_thread``) may execute on others, too.

Nothing here imports more than NumPy, because a process host may run in an environment of its
model's, which has no more.
"""

from __future__ import annotations

import posixpath
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from headrace.backends.sharing import Shared
from headrace.config.path_checks import one_line, why_path_leaves
from headrace.config.regular_files import special_kind
from headrace.errors import ConfigError, HeadraceError, LoadError
from headrace.messages import dtypes
from headrace.messages.dtypes import DataType
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.tensor import Tensor

if TYPE_CHECKING:
    from headrace.backends.services import Services
    from headrace.config.model_config_pb2 import ModelConfig

Tensors: TypeAlias = Mapping[str, Tensor]
DeviceKind: TypeAlias = Literal["cpu", "gpu", "model"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where an instance runs. ``id`` counts GPUs from 0, and is 0 elsewhere."""

    kind: DeviceKind = "cpu"
    id: int = 0


@dataclass(frozen=True, slots=True)
class Isolation:
    """How the instances of a model run in processes of their own.

    ``python`` is the interpreter, ``environ`` is added to the server's environment variables.
    ``entry`` is ``module:function`` in that interpreter: it is given a
    `headrace.executors.process.handshake.InstanceSpec` and returns the instance. The default makes the backend
    anew there and calls its ``load``. An interpreter other than the server's imports ``packages``
    from the server's installation, and nothing else of it. ``start_timeout_s`` is for the start
    of the interpreter and ``load_timeout_s`` for the instance; only what they add up to is a bound.
    ``memory_bytes`` bounds what a process may allocate; 0 is no bound. ``busy_poll_us`` is how long it,
    and the server for it, look for the next message before they sleep: worth its CPU where a core that sleeps is slow
    to wake.
    """

    python: str = sys.executable
    environ: Mapping[str, str] = field(default_factory=dict)
    entry: str = "headrace.executors.process.handshake:load"
    packages: tuple[str, ...] = ("headrace",)
    start_timeout_s: float = 30.0
    load_timeout_s: float = 600.0
    memory_bytes: int = 0
    busy_poll_us: int = 0


@dataclass(frozen=True, slots=True)
class NoParameters:
    """The ``Parameters`` of a backend that takes none: the config's map passes unread."""


@dataclass(frozen=True, slots=True)
class Model:
    """One version of a model, as its backend sees it.

    ``path`` is the version's directory. ``config`` is the parsed ``config.pbtxt`` and must not be
    changed, except by ``Backend.complete_config``. ``parameters`` is an instance of the backend's
    ``Parameters``, in ``complete_config``, too. ``shared`` is what ``Backend.share`` returned.
    ``instance_name`` and ``device`` describe the instance being loaded; during ``complete_config`` and
    ``share`` they are empty.
    ``services`` is what the server does for its models; None during ``complete_config``.
    ``is_sent``: the config, or all of the model, came with a load request and not from the repository,
    so it must not name anything outside the model's directory.
    """

    name: str
    version: int
    path: Path
    config: ModelConfig
    parameters: Any = NoParameters()
    shared: Any = None
    instance_name: str = ""
    device: Device = field(default_factory=Device)
    services: Services | None = None
    is_sent: bool = False

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
        if reason := why_path_leaves(relative, levels=1):
            raise LoadError(
                f"file '{one_line(relative)}' of model '{self.name}' is outside the model directory: {reason}"
            )
        path = self.path / posixpath.normpath(relative)  # not through a link and up again
        try:
            kind = special_kind(path.stat().st_mode)
        except OSError as error:
            hint = _beside(path)
            raise LoadError(f"no file '{path}' for model '{self.name}' version {self.version}{hint}") from error
        if kind:
            raise LoadError(f"'{path}' of model '{self.name}' is {kind}, not a regular file")
        return path

    def resource_or_above(self, relative: str) -> Path:
        """`resource`, or where the version has no such file, that of the model's directory, which all versions use."""
        return self.resource(relative if (self.path / relative).exists() else f"../{relative}")

    def refuse_if_sent(self, setting: str, field: str = "") -> None:
        """Raise `ConfigError` if ``setting``, in words, was not written by whoever keeps the repository: for what gives
        a model more rights than to compute, such as libraries of native code. ``field`` is that of the config."""
        if self.is_sent:
            raise ConfigError(
                f"{setting} of model '{self.name}' came with a load request: it counts in the repository only",
                field=field,
            )


def _beside(path: Path) -> str:
    """What to do where ``path`` is missing and one file of its kind stands in its place; empty for none or several."""
    try:
        found = [one_line(other.name) for other in path.parent.iterdir() if path.suffix and other.suffix == path.suffix]
    except OSError:
        return ""
    if len(found) != 1:
        return ""
    return f". Its directory has '{found[0]}': rename it, or set default_model_filename: \"{found[0]}\""


class Backend(ABC):
    """Loads models of one kind. One object per server, made when a model first needs it.

    ``name`` is what ``backend:`` says in a config. ``Parameters`` is a frozen dataclass with
    defaults; core fills it from the config's ``parameters`` (str, int, float and bool fields) and
    warns of an unknown key, with the known ones; ``--strict-parameters`` makes it a `ConfigError`.
    Import the engine inside ``load``.
    """

    name: ClassVar[str]
    Parameters: ClassVar[type] = NoParameters
    #: Kinds of device that an instance can run on, most preferred first.
    devices: ClassVar[tuple[DeviceKind, ...]] = ("cpu",)
    dtypes: ClassVar[tuple[DataType, ...]] = dtypes.ALL
    #: Whether an output whose data type or dims are not the config's is passed on as it is, with one
    #: warning, instead of being an error. For models that were written for Triton, which passes them on.
    outputs_as_given: ClassVar[bool] = False
    #: Options that ``headrace serve --dev`` sets where the command line says nothing else.
    dev_options: ClassVar[Mapping[str, str]] = {}
    #: Whether a config's ``runtime`` may name a Python file of this backend.
    has_runtimes: ClassVar[bool] = False
    #: Instances of a CPU group whose config gives no count, unless `cpu_instances` says otherwise of that config.
    default_cpu_instances: ClassVar[int] = 1
    #: What it acts on of a config's fields for engines: ``cc_model_filenames``, ``model_operations``,
    #: ``optimization.cuda``, ``optimization.execution_accelerators``, ``optimization.graph``. The log warns of a config
    #: that sets another of these. None if it does not say.
    engine_fields: ClassVar[tuple[str, ...] | None] = None
    #: The base classes that its instances may have; empty if it does not say. For the table of what it can do.
    rungs: ClassVar[tuple[type[BaseInstance], ...]] = ()
    #: What of it has never run where it is meant to run, as a sentence without its subject: ``its kernels have not run
    #: on a GPU yet``. ``headrace plugins`` says it. Empty for nothing.
    unproven: ClassVar[str] = ""

    @classmethod
    def location(cls) -> str:
        """Where its code is, as the log says at start."""
        return sys.modules[cls.__module__].__file__ or ""

    def __init__(self, options: Mapping[str, str]) -> None:
        """``options`` are the ``--backend-config=<name>,key=value`` settings."""
        self.options = options

    @abstractmethod
    def load(self, model: Model) -> AnyInstance:
        """One instance of ``model`` on ``model.device``; called on the instance's thread, while those
        of its other instances may do the same.

        Raises `LoadError` naming the file or the setting at fault.
        """

    def complete_config(self, model: Model) -> None:
        """Fill what ``model.config`` leaves out, in place: ``max_batch_size``, ``input``,
        ``output``, a scheduling choice, ``model_transaction_policy``. Not called when
        auto-completion is off. Raises `LoadError` or `ConfigError`."""

    def cpu_instances(self, config: ModelConfig) -> int:
        """Instances of a CPU group of ``config`` that gives no count: `default_cpu_instances`, unless it depends on
        the model, as where some keep something from one request to the next. Any thread."""
        return self.default_cpu_instances

    def isolation(self, model: Model) -> Isolation | None:
        """How to give each instance of ``model`` a process of its own; None for a thread of the server.

        The model parameter ``isolation`` (``process`` or ``thread``) goes before it. Raises
        `LoadError`.
        """
        return None

    def share(self, model: Model) -> Any:
        """Something that the instances of one version use together (weights, an engine): a `Shared`, as a rule."""
        return None

    def unshare(self, shared: Any) -> None:
        """Release what `share` returned; called after the last instance has closed. A `Shared` is closed."""
        if isinstance(shared, Shared):
            shared.close()


class BaseInstance:
    """The defaulted neighbours that all four rungs have in common."""

    #: Whether ``execute`` or ``execute_requests`` may be called on any thread, one call at a time, the server's event
    #: loop among them: it keeps nothing in a thread, and waits for nobody, so that it uses no `Model.services`. Looked
    #: at once, when the instance is loaded. The other methods are called on the instance's own thread as ever, and
    #: never while it executes.
    any_thread: bool = False
    #: How many calls of ``execute`` or ``execute_requests`` it takes at once, each on a thread of its own, for engines
    #: that compute side by side or copy meanwhile. Looked at once, when the instance is loaded. All the same it is
    #: called once at a time in a process of its own, under a rate limiter, and by schedulers to which instances are not
    #: alike, as for sequences.
    concurrency: int = 1

    def warm_up(self) -> None:
        """Make the first request as fast as the second. Called once, before the model is ready."""

    def is_ready(self) -> bool:
        """False takes the model out of readiness. Called on a thread of its own, one call at a time.

        May block, but not for more than 5 s. A raise is a False with that reason."""
        return True

    def close(self) -> None:
        """Release everything; no other method is called afterwards."""


class Instance(BaseInstance, ABC):
    """Rung 1: stateless rows. ``response_parameters`` go with every answer, and do not change."""

    response_parameters: ClassVar[Mapping[str, str | int | bool | float]] = MappingProxyType({})

    @abstractmethod
    def execute(self, inputs: Tensors) -> Tensors:
        """``inputs`` and the result map names to tensors that share the first axis, the rows of
        the batch (no batch axis if ``max_batch_size`` is 0). Do not write to the inputs, and do
        not reuse an output's buffer. A raise leaves the instance in use: the requests of the batch
        are executed again, one by one, and the one that raises alone fails; raise `HeadraceError`
        to choose the code."""


class RequestInstance(BaseInstance, ABC):
    """Rung 2: the requests of a batch, one by one."""

    @abstractmethod
    def execute_requests(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | HeadraceError]:
        """One answer per request, in order. A raise fails the whole batch."""


class StreamInstance(BaseInstance, ABC):
    """Rung 3: any number of responses per request."""

    @abstractmethod
    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        """The responses, as they become available. ``request.cancelled`` is looked at between
        them, and closes the iterator. A raise ends the request with an error."""


class Call(ABC):
    """A request that a `DeferredInstance` has accepted, and the way to answer it."""

    request: InferRequest

    @abstractmethod
    def send(self, answer: InferResponse | HeadraceError | None, final: bool = True) -> None:
        """Give one answer; ``final`` says that it is the last. None with ``final`` only ends.

        Any thread. Blocks while `headrace.messages.ticket.UNREAD` responses are unread; drops
        what comes after the caller has gone (``request.cancelled``). Must not be called again
        after ``final``.
        """


class DeferredInstance(BaseInstance, ABC):
    """Rung 4: answers at any time, from any thread."""

    @abstractmethod
    def accept(self, calls: Sequence[Call]) -> Sequence[InferResponse | HeadraceError | None] | None:
        """Begin a batch. Return when the instance can take the next; the answers may come later.

        What is known by then may be returned, which costs less than to send it: for each call, in order, its last
        answer, or None if that was sent, or will be. Answers that are returned, or sent before, travel together. A
        raise ends with that error every call of the batch that has no last answer yet."""


AnyInstance: TypeAlias = Instance | RequestInstance | StreamInstance | DeferredInstance
