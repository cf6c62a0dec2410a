"""The start of a child: the instance that it loads, the result of loading, and readiness checks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.backends.base import AnyInstance, Backend, Device, DeviceKind, Model
from headrace.backends.services import Services
from headrace.config.padding import PaddingRules
from headrace.errors import Code, LoadError, Unavailable
from headrace.executors.instance import backend_errors, load_instance, shaping_of, share
from headrace.executors.output_schema import OutputSchema
from headrace.executors.ragged import RaggedLayout
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace_processes.ipc.framing import FIRST_OWN_KIND, VERSION, Frame, ProtocolError, frame
from headrace_processes.ipc.json_parts import read_json

log = logging.getLogger(__name__)

_SET_IN_CHILD = frozenset(("services", "cleanup"))


class ChildKind(IntEnum):
    """The kinds of frame between a child and its server, beside `headrace_processes.ipc.framing.Kind`."""

    LOAD = FIRST_OWN_KIND  # to the child; JSON: an instance spec
    LOADED = FIRST_OWN_KIND + 1  # JSON: the properties of the instance that the server needs
    FAILED = FIRST_OWN_KIND + 2  # JSON: code, message, traceback
    CLOSE = FIRST_OWN_KIND + 3  # to the child: close the instance and exit
    CHECK = FIRST_OWN_KIND + 4  # to the child: call the instance's `is_ready`
    CHECKED = FIRST_OWN_KIND + 5  # JSON: ready, reason
    UPDATE = FIRST_OWN_KIND + 6  # handle, operation, value: of a metric


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance of one version, as a child loads it.

    - ``path``: the version's directory.
    - ``backend``: ``module:class``. ``options``: its ``--backend-config`` settings.
    - ``config``: the model's config as JSON, in the form of the ``/config`` endpoint. ``parameters``: its parameters as
      text.
    - ``entry``: as in `headrace.backends.base.Isolation`. ``is_sent``: as in `headrace.backends.base.Model`.
    - ``outputs_as_given``: the backend's attribute.
    - ``kept``: the outputs that the scheduler keeps from callers, in the form of ``config``.
    - ``services`` and ``cleanup`` are set in the child. ``cleanup`` is closed after the instance, or when loading
      fails.
    """

    entry: str
    backend: str
    options: Mapping[str, str]
    name: str
    version: int
    path: str
    config: str
    parameters: Mapping[str, str]
    instance_name: str
    device_kind: DeviceKind
    device_id: int
    outputs_as_given: bool = False
    kept: Sequence[Mapping[str, Any]] = ()
    is_sent: bool = False
    services: Services | None = None
    cleanup: ExitStack = field(default_factory=ExitStack, compare=False)

    def to_json(self) -> bytes:
        """Return the spec as JSON, without the fields that are set in the child."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _SET_IN_CHILD}
        return json.dumps(values).encode()

    @property
    def is_decoupled(self) -> bool:
        """True if requests may have any number of responses."""
        return bool(json.loads(self.config).get("model_transaction_policy", {}).get("decoupled", False))

    def schema(self) -> OutputSchema:
        """Return the outputs of the model, without checks: the server checks responses and undoes reshapes."""
        config = json.loads(self.config)
        config["output"] = [*config.get("output", ()), *self.kept]
        return UncheckedSchema.from_json(config, str(self.version), self.outputs_as_given)

    def shaping(self) -> RaggedLayout | PaddingRules | None:
        """Return the rules of the config for requests of different shapes."""
        return shaping_of(json.loads(self.config))

    @classmethod
    def from_json(cls, text: bytes, services: Services) -> InstanceSpec:
        values: dict[str, Any] = json.loads(text)
        return cls(**values, services=services)


def load(spec: InstanceSpec) -> AnyInstance:
    """Create a backend object and return the instance of ``spec``. Errors of the backend are passed on.

    The default entry, for backends that define none.
    """
    from google.protobuf.json_format import Parse

    from headrace.config.model_config_pb2 import ModelConfig
    from headrace.config.parameters import parse_parameters

    module, _, name = spec.backend.partition(":")
    backend: Backend = getattr(import_module(module), name)(spec.options)
    config = Parse(spec.config, ModelConfig())
    model = Model(
        spec.name,
        spec.version,
        Path(spec.path),
        config,
        parse_parameters(backend.Parameters, config.parameters),
        None,
        spec.instance_name,
        Device(spec.device_kind, spec.device_id),
        spec.services,
        spec.is_sent,
    )
    shared = share(backend, model, spec.cleanup)
    with backend_errors(backend, model.name):
        return load_instance(backend, replace(model, shared=shared))


@dataclass(frozen=True, slots=True)
class UncheckedSchema(OutputSchema):
    """The schema in a child. It checks nothing, because the server checks every response of a child."""

    def signed(self, request: InferRequest, answer: Answer) -> Answer:
        """Return ``answer`` without the outputs that were not requested, so that they are not sent."""
        requested = request.outputs
        if isinstance(answer, InferResponse) and requested and len(answer.outputs) > 1:
            outputs = {k: v for k, v in answer.outputs.items() if k in requested or k not in self.outputs}
            return replace(answer, outputs=outputs)
        return answer


class Handshake:
    """The handshake with the instance ``name``. ``send`` writes a frame. Event loop of the server only.

    - ``loaded``: completes when the instance is loaded; True if it has an ``is_ready``.
    - ``takes_device_tensors``: True if the instance takes or returns device tensors. Then ``gpus`` are the UUIDs of the
      GPUs that its process can use, and ``inputs_on_host`` is that of the instance.
    """

    def __init__(self, name: str, send: Callable[[bytes], None]) -> None:
        self._name, self._send = name, send
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[bool] = self._loop.create_future()
        self._checked: asyncio.Future[tuple[bool, str]] | None = None
        self.takes_device_tensors = self.inputs_on_host = False
        self.gpus: Sequence[str] = ()

    async def check(self) -> bool:
        """True if the instance is ready. Raises `Unavailable` if it gives a reason why not."""
        if self._checked is None:
            self._checked = self._loop.create_future()
            self._send(frame(ChildKind.CHECK, 0))
        ready, reason = await asyncio.shield(self._checked)
        if reason:
            raise Unavailable(reason)
        return ready

    def receive(self, message: Frame) -> bool:
        """Handle LOADED, FAILED or CHECKED. Return False for another kind. Raises `ProtocolError`."""
        if message.kind == ChildKind.CHECKED:
            content = read_json(message)
            checked, self._checked = self._checked, None
            if checked is not None:
                checked.set_result((bool(content["ready"]), str(content["reason"])))
        elif message.kind == ChildKind.FAILED:
            content = read_json(message)
            log.error("instance '%s' failed to load:\n%s", self._name, content["traceback"].rstrip())
            self.loaded.set_exception(LoadError(content["message"], Code(content["code"])))
        elif message.kind == ChildKind.LOADED:
            content = read_json(message)
            if content["version"] != VERSION:
                raise ProtocolError(f"version {content['version']} of the schema, not {VERSION}")
            if "gpus" in content:
                self.takes_device_tensors, self.gpus = True, [str(uuid) for uuid in content["gpus"]]
                self.inputs_on_host = bool(content["inputs_on_host"])
            self.loaded.set_result(bool(content["has_check"]))
        else:
            return False
        return True

    def end(self, reason: str, report: str) -> None:
        """Fail every call that waits: the child has died for ``reason``, with the crash ``report``."""
        if self._checked is not None and not self._checked.done():
            self._checked.set_result((False, reason))
        if not self.loaded.done():
            self.loaded.set_exception(LoadError(f"{reason} while it was loading\n{report}".rstrip()))
