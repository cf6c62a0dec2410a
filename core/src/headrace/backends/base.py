"""The interface of a backend.

The smallest backend is one class with ``name`` and ``load``, and one instance class with ``execute``;
`headrace.backends.identity` is a complete example. There are four kinds of instance. The base class decides, once, at
load:

| Base class | Method | For |
|---|---|---|
| `Instance` | ``execute(tensors) -> tensors`` | rows in, rows out |
| `RequestInstance` | ``execute_requests(requests) -> answers`` | ragged inputs, parameters, one error per request |
| `StreamInstance` | ``stream(request) -> iterator of responses`` | decoupled models |
| `DeferredInstance` | ``accept(calls)`` | answers at any time and from any thread |

For an `Instance`, core stacks the rows of many requests, splits the results, and checks names, dtypes and shapes on
both sides. For the others, the shapes of outputs are the instance's responsibility.

``load`` and all methods of an instance except ``is_ready`` run on that instance's own thread, in the server's process
or in a process of the instance (`Isolation`). An instance of the first two kinds may allow other threads
(``BaseInstance.any_thread``).

This module imports only NumPy, because the process of an instance may run in an environment of its model without other
packages.
"""

from __future__ import annotations

import posixpath
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The device of an instance. ``id`` counts GPUs from 0, and is 0 elsewhere."""

    kind: DeviceKind = "cpu"
    id: int = 0


@dataclass(frozen=True, slots=True)
class Isolation:
    """The settings of a model whose instances run in processes of their own.

    - ``python``: the interpreter. ``environ`` is added to the server's environment variables.
    - ``entry``: ``module:function`` in that interpreter. It gets an `InstanceSpec` and returns the instance.
      Without an entry, the process creates the backend again and calls its ``load``.
    - ``packages``: what an interpreter other than the server's imports from the server's installation, and nothing
      else.
    - ``start_timeout_s`` and ``load_timeout_s``: for the start of the interpreter and for the instance. The limit is
      their sum.
    - ``memory_bytes``: limit of the memory that a process may allocate; 0 for none.
    - ``busy_poll_us``: how long the process, and the server for it, poll for the next message before they sleep. This
      costs CPU time, and helps where a sleeping core is slow to wake.
    - ``restart_pause_s``: the first pause of an instance whose process dies too often. Later pauses are longer.
    """

    python: str = sys.executable
    environ: Mapping[str, str] = field(default_factory=dict)
    entry: str = ""
    packages: tuple[str, ...] = ("headrace",)
    start_timeout_s: float = 30.0
    load_timeout_s: float = 600.0
    memory_bytes: int = 0
    busy_poll_us: int = 0
    restart_pause_s: int = 15


@dataclass(frozen=True, slots=True)
class NoParameters:
    """The ``Parameters`` of a backend without any: the config's map is not read."""


@dataclass(frozen=True, slots=True)
class Model:
    """One version of a model, for its backend.

    - ``path``: the version's directory.
    - ``config``: the parsed ``config.pbtxt``. Only ``Backend.complete_config`` may change it.
    - ``parameters``: an object of the backend's ``Parameters``, also in ``complete_config``.
    - ``shared``: the result of ``Backend.share``.
    - ``instance_name`` and ``device``: of the instance that is loaded; empty during ``complete_config`` and ``share``.
    - ``services``: the server's services for models; None during ``complete_config``.
    - ``is_sent``: True if the config, or the whole model, came with a load request and not from the repository. It must
      then not name anything outside the model's directory.
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
        """Return the path of the model's file: ``default_model_filename`` if the config sets it, else ``default``.

        Raises `LoadError` with the path if it does not exist, or is outside the model directory.
        """
        return self.resource(self.config.default_model_filename or default)

    def resource(self, relative: str) -> Path:
        """Return the path of ``relative`` in the version's directory, with the checks of `file`."""
        if reason := why_path_leaves(relative, levels=1):
            raise LoadError(
                f"file '{one_line(relative)}' of model '{self.name}' is outside the model directory: {reason}"
            )
        path = self.path / posixpath.normpath(relative)  # resolves `..` before links are followed
        try:
            kind = special_kind(path.stat().st_mode)
        except OSError as error:
            hint = _beside(path)
            raise LoadError(f"no file '{path}' for model '{self.name}' version {self.version}{hint}") from error
        if kind:
            raise LoadError(f"'{path}' of model '{self.name}' is {kind}, not a regular file")
        return path

    def resource_or_above(self, relative: str) -> Path:
        """Return `resource`; if the version lacks the file, the same file of the model's directory, which all versions
        share."""
        return self.resource(relative if (self.path / relative).exists() else f"../{relative}")

    def refuse_if_sent(self, setting: str, field: str = "") -> None:
        """Raise `ConfigError` if ``setting`` is from a load request and not from the repository.

        For settings that give a model more rights than to compute, such as native libraries. ``setting`` is a noun for
        the message; ``field`` is the field of the config.
        """
        if self.is_sent:
            raise ConfigError(
                f"{setting} of model '{self.name}' came with a load request: it counts in the repository only",
                field=field,
            )


def _beside(path: Path) -> str:
    """Return a hint if ``path`` is missing and its directory has one file, or one with the same suffix; else empty."""
    try:
        others = [Path(one_line(other.name)) for other in path.parent.iterdir()]
    except OSError:
        return ""
    alike = [other for other in others if path.suffix and other.suffix == path.suffix]
    if len(alike) == 1:
        return f". Its directory has '{alike[0]}': rename it, or set default_model_filename: \"{alike[0]}\""
    return f". Its directory has only '{others[0]}'" if len(others) == 1 else ""


class Backend(ABC):
    """Loads models of one kind. One object per server, created when a model first needs it.

    ``name`` is the value of ``backend:`` in a config. ``Parameters`` is a frozen dataclass with defaults. Core fills it
    from the config's ``parameters`` (str, int, float and bool fields). An unknown key causes a warning with the known
    ones, or a `ConfigError` with ``--strict-parameters``.

    Import the engine inside ``load``.
    """

    name: ClassVar[str]
    Parameters: ClassVar[type] = NoParameters
    #: The kinds of device that an instance can run on, most preferred first.
    devices: ClassVar[tuple[DeviceKind, ...]] = ("cpu",)
    dtypes: ClassVar[tuple[DataType, ...]] = dtypes.ALL
    #: True to pass on an output whose data type or dims differ from the config, with one warning, instead of failing.
    #: For models that were written for Triton, which passes them on.
    outputs_as_given: ClassVar[bool] = False
    #: Options that ``headrace serve --dev`` sets unless the command line does.
    dev_options: ClassVar[Mapping[str, str]] = {}
    #: True if a config's ``runtime`` may name a Python file of this backend.
    has_runtimes: ClassVar[bool] = False
    #: Instances of a CPU group whose config has no count, unless `cpu_instances` is overridden.
    default_cpu_instances: ClassVar[int] = 1
    #: The engine fields of a config on which it acts, of ``cc_model_filenames``, ``model_operations``,
    #: ``optimization.cuda``, ``optimization.execution_accelerators`` and ``optimization.graph``. The log warns about a
    #: config that sets another one. None: unknown, no warnings.
    engine_fields: ClassVar[tuple[str, ...] | None] = None
    #: The base classes of its instances, for the table of capabilities. Empty: unknown.
    instance_classes: ClassVar[tuple[type[BaseInstance], ...]] = ()
    #: The accelerators on which it has run, or that it has run on none, as a sentence such as
    #: ``it has run on an NVIDIA H200``. ``headrace plugins`` shows it. Empty for a backend of CPUs.
    hardware: ClassVar[str] = ""

    @classmethod
    def location(cls) -> str:
        """Return the location of its code, for the log at start."""
        return sys.modules[cls.__module__].__file__ or ""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Create the backend with its ``--backend-config=<name>,key=value`` settings as ``options``.

        If it has `devices` of kind ``gpu``, they have ``pinned-memory-pool-byte-size``, from the flag of that name.
        """
        self.options = options

    @abstractmethod
    def load(self, model: Model) -> AnyInstance:
        """Return one instance of ``model`` on ``model.device``.

        Called on the instance's thread, at the same time as for other instances. Raises `LoadError` with the file or
        the setting at fault.
        """

    def complete_config(self, model: Model) -> None:
        """Complete ``model.config`` in place: ``max_batch_size``, ``input``, ``output``, a scheduling choice,
        ``model_transaction_policy``.

        Not called when auto-completion is off. Raises `LoadError` or `ConfigError`.
        """

    def cpu_instances(self, config: ModelConfig) -> int:
        """Return the instances of a CPU group of ``config`` that has no count. Any thread.

        The default is `default_cpu_instances`. Override it if the number depends on the model, for example if the model
        keeps state between requests.
        """
        return self.default_cpu_instances

    def isolation(self, model: Model) -> Isolation | None:
        """Return how each instance of ``model`` gets a process of its own; None for a thread of the server.

        The model parameter ``isolation`` (``process`` or ``thread``) has priority. Raises `LoadError`.
        """
        return None

    def repository_code(self, config: ModelConfig) -> str:
        """Return what of the model's own files runs as code, such as ``model.py``; empty for none. For ``headrace check
        --security``, which adds ``op_library_filename`` itself."""
        return ""

    def share(self, model: Model) -> Any:
        """Return what the instances of one version share, such as weights or an engine; usually a `Shared`."""
        return None

    def unshare(self, shared: Any) -> None:
        """Release what `share` returned, after the last instance has closed. A `Shared` is closed."""
        if isinstance(shared, Shared):
            shared.close()


class BaseInstance:
    """The members that the four kinds of instance have in common. Everything has a default."""

    #: True if ``execute`` or ``execute_requests`` may be called on any thread, one call at a time, also on the server's
    #: event loop. The instance must then keep no state in a thread, and wait for nothing, so it must not use
    #: `Model.services`. Read once, when the instance is loaded. The other methods are still called on the instance's
    #: own thread, and never while it executes.
    any_thread: bool = False
    #: How many calls of ``execute`` or ``execute_requests`` it takes at once, each on a thread of its own. For engines
    #: that compute in parallel or copy meanwhile. Read once, when the instance is loaded. One call at a time is made in
    #: a process of its own, under a rate limiter, and by schedulers that treat instances differently, as for sequences.
    concurrency: int = 1
    #: True if an `Instance` takes inputs in the memory of a device, and may return such outputs: `DeviceTensor`. An
    #: input of several requests is `StackedTensors`, except strings. Core copies an output to the host if a caller
    #: takes it there. The same for all instances of a model. Read once, when the instance is loaded.
    takes_device_tensors: bool = False
    #: True if a process of its own is to get its inputs in the memory of the host, although it may return such outputs.
    inputs_on_host: bool = False
    #: Set before each execution of an instance that takes device tensors: False if all callers want results in the
    #: memory of the host. A hint, which may be that of another execution if several calls run at once.
    wants_device_tensors: bool = True

    def wait_to_take(self) -> int:
        """Wait until the next batch should be taken, if several calls run at once (`concurrency`): more requests join.
        Return among how many calls the requests in flight are divided: 0 for all, 1 if only the instance's own thread
        is to run batches for now. Called before each batch, on the thread of the call, one at a time."""
        return 0

    def warm_up(self) -> None:
        """Make the first request as fast as the second. Called once, before the model is ready."""

    def is_ready(self) -> bool:
        """Return False to make the model not ready. An exception counts as False, with its text as the reason.

        Called on a thread of its own, one call at a time. May block, for at most 5 s.
        """
        return True

    def close(self) -> None:
        """Release everything. No other method is called afterwards."""


class Instance(BaseInstance, ABC):
    """Runs stateless rows. ``response_parameters`` are sent with every response, and do not change."""

    response_parameters: ClassVar[Mapping[str, str | int | bool | float]] = MappingProxyType({})

    @abstractmethod
    def execute(self, inputs: Tensors) -> Tensors:
        """Return the outputs for ``inputs``. Both map names to tensors.

        All tensors share the first axis, the rows of the batch (no batch axis if ``max_batch_size`` is 0). Do not write
        to the inputs, and do not reuse an output's buffer.

        If this raises, the instance stays in use: the requests of the batch are executed again, one by one, and only
        the one that raises fails. Raise `HeadraceError` to choose the code.
        """


class RequestInstance(BaseInstance, ABC):
    """Runs the requests of a batch one by one."""

    @abstractmethod
    def execute_requests(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | HeadraceError]:
        """Return one answer per request, in order. If this raises, the whole batch fails."""


class StreamInstance(BaseInstance, ABC):
    """Returns any number of responses per request."""

    @abstractmethod
    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        """Return the responses as they become available.

        After each one, ``request.cancelled`` is read; if it is True, the iterator is closed. If this raises, the
        request ends with an error.
        """


class Call(ABC):
    """A request that a `DeferredInstance` has accepted, and the method to answer it."""

    request: InferRequest
    #: True if `send` would block now, because the caller reads slowly. Any thread.
    would_block: bool = False
    #: Returns the usage that the model has not reported, for a request that ends with an error or whose caller
    #: disconnects. It is sent before the error. It must not refer to this call. Any thread.
    used: Callable[[], InferResponse | None] | None = None

    @abstractmethod
    def send(self, answer: InferResponse | HeadraceError | None, final: bool = True) -> None:
        """Send one answer. ``final`` marks the last one; None with ``final`` only ends the request.

        Any thread. Blocks while `headrace.messages.ticket.UNREAD` responses are unread. Drops answers after the caller
        has disconnected (``request.cancelled``). Do not call it again after ``final``.
        """


class DeferredInstance(BaseInstance, ABC):
    """Answers at any time, from any thread."""

    @abstractmethod
    def accept(self, calls: Sequence[Call]) -> Sequence[InferResponse | HeadraceError | None] | None:
        """Start a batch. Return when the instance can take the next one; answers may follow later.

        The result has, for each call in order, its last answer, or None if that was sent or will be. Returning an
        answer costs less than sending it. Answers that are returned, or sent before the return, are delivered together.
        If this raises, every call of the batch without a last answer ends with that error.
        """


AnyInstance: TypeAlias = Instance | RequestInstance | StreamInstance | DeferredInstance
