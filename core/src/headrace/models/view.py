"""`ModelView`: the facts about a served version that frontends use.

Its documents have the same keys in JSON and in protobuf.

Source: docs/spec/behaviours.md section 1.6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import HeadraceError
from headrace.messages.request import InferRequest
from headrace.messages.spec import Spec
from headrace.messages.ticket import Ticket
from headrace.models.signature import Signature
from headrace.schedulers.base import Occupancy
from headrace.telemetry.executions import Duration, Observer
from headrace.telemetry.statistics import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class ModelView:
    """One served version. Created at load, and again when its instances change. All its callers share it.

    ``labels`` maps an output to the lines of its label file. ``metadata`` is the metadata document without the name and
    the versions. The last five fields are functions, not methods, so that a request pays no extra call. Call them on
    the event loop.
    """

    name: str
    version: int
    platform: str
    max_batch_size: int
    decoupled: bool
    config: ModelConfig
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    labels: Mapping[str, Sequence[str]]
    metadata: Mapping[str, Any]
    occupancy: Occupancy
    #: `Signature.check` of the version: sets what the scheduler needs of a request, or raises `HeadraceError`.
    check: Callable[[Ticket], None]
    #: `headrace.models.signature.explain` of the version: returns why a request is invalid.
    explain: Callable[[InferRequest], HeadraceError]
    #: `ModelQueue.submit` of the version, for a request that was checked.
    enqueue: Callable[[Ticket], None]
    #: Reports the executions of the version to an observer, until the function that it returns is called.
    observe: Callable[[Observer], Callable[[], None]]
    #: Returns how many requests of one row fill the batches of all instances. 0 if no such number is known: for a
    #: decoupled model, one without instances, one whose scheduler keeps state from one request to the next, and one
    #: that answers later than its executions return.
    capacity: Callable[[], int]
    #: The inputs that may be `DeviceTensor`s; outputs may be by `Ticket.on_device`. None: all are arrays.
    takes_device_tensors: Collection[str] | None = None


def metadata_document(platform: str, signature: Signature) -> dict[str, Any]:
    """Return the metadata of one version, without its name and the list of versions."""
    return {
        "platform": platform,
        "inputs": _tensors(signature.inputs, signature.wire_shape),
        "outputs": _tensors(signature.outputs, signature.wire_shape),
    }


def statistics_document(name: str, version: int, numbers: Snapshot) -> dict[str, Any]:
    """Return the statistics document of a version since its load, from ``numbers``."""
    executions = numbers.executions
    return {
        "name": name,
        "version": str(version),
        "last_inference": executions.last_inference_ms,
        "inference_count": executions.inference_count,
        "execution_count": executions.execution_count,
        "inference_stats": {
            "success": _duration(numbers.success),
            "fail": _duration(numbers.fail),
            "queue": _duration(numbers.queue),
            "compute_input": _duration(executions.compute_input),
            "compute_infer": _duration(executions.compute_infer),
            "compute_output": _duration(executions.compute_output),
            "cache_hit": _duration(numbers.cache_hit),
            "cache_miss": _duration(numbers.cache_miss),
        },
        "response_stats": numbers.responses.document(),
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": _duration(batch.compute_input),
                "compute_infer": _duration(batch.compute_infer),
                "compute_output": _duration(batch.compute_output),
            }
            for size, batch in sorted(executions.batches.items())
        ],
        "memory_usage": [],
    }


def _tensors(specs: Mapping[str, Spec], wire_shape: Callable[[Spec], tuple[int, ...]]) -> list[dict[str, Any]]:
    return [
        {"name": spec.name, "datatype": spec.datatype.name, "shape": list(wire_shape(spec))} for spec in specs.values()
    ]


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
