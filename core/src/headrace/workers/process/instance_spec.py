"""What a child process is told to load, and the usual way to load it. JSON on the wire: it is sent once per life."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.backends.base import AnyInstance, Backend, Device, DeviceKind, Model
from headrace.backends.services import Services
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.workers.instance import failures_worded, load_instance, share
from headrace.workers.output_schema import OutputSchema


@dataclass(frozen=True, slots=True)
class Unjudged(OutputSchema):
    """The schema in a child, whose responses the server judges in any case, since it believes no child."""

    def signed(self, request: InferRequest, answer: Answer) -> Answer:
        """``answer`` without the outputs that nobody asked for: they need not travel."""
        wanted = request.outputs
        if isinstance(answer, InferResponse) and wanted and len(answer.outputs) > 1:
            kept = {k: v for k, v in answer.outputs.items() if k in wanted or k not in self.outputs}
            return replace(answer, outputs=kept)
        return answer


_SET_IN_CHILD = frozenset(("services", "cleanup"))


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """One instance of one version.

    ``path`` is the version's directory. ``backend`` is ``module:class`` and ``options`` its
    ``--backend-config`` settings. ``config`` is the model's config as JSON, in the form of the
    ``/config`` endpoint, and ``parameters`` its parameters as text. ``entry`` is that of
    `headrace.backends.base.Isolation`. ``outputs_as_given`` is the backend's. ``kept`` are the outputs
    that the scheduler keeps from callers, as in ``config``. ``services`` and
    ``cleanup`` are set in the child: what the entry leaves in ``cleanup`` is done when the instance has
    closed, and when it cannot be loaded.
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
    services: Services | None = None
    cleanup: ExitStack = field(default_factory=ExitStack, compare=False)

    def to_json(self) -> bytes:
        """The spec without what is set in the child."""
        sent = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _SET_IN_CHILD}
        return json.dumps(sent).encode()

    def schema(self) -> OutputSchema:
        """What the model promises; the server judges responses, and undoes reshapes."""
        config = json.loads(self.config)
        config["output"] = [*config.get("output", ()), *self.kept]
        return Unjudged.from_json(config, str(self.version), self.outputs_as_given)

    @classmethod
    def from_json(cls, text: bytes, services: Services) -> InstanceSpec:
        sent: dict[str, Any] = json.loads(text)
        return cls(**sent, services=services)


def load(spec: InstanceSpec) -> AnyInstance:
    """The instance that ``spec`` describes, by a backend made anew: the entry of backends that have none of
    their own. Raises what the backend raises."""
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
    )
    shared = share(backend, model, spec.cleanup)
    with failures_worded(backend, model.name):
        return load_instance(backend, replace(model, shared=shared))
