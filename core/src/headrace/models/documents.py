"""What protocols say about models, as documents whose keys are the same in JSON and in protobuf
(docs/spec/behaviours.md section 1.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headrace.messages.spec import Spec
from headrace.models.signature import Signature
from headrace.telemetry.statistics import Duration, Snapshot


class Measured(Protocol):
    """What is needed of a `headrace.models.served.ServedModel`."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    def snapshot(self) -> Snapshot: ...


def metadata(platform: str, signature: Signature) -> dict[str, Any]:
    """The metadata of one version, behind its name and the list of versions."""
    return {
        "platform": platform,
        "inputs": _tensors(signature.inputs, signature.wire_shape),
        "outputs": _tensors(signature.outputs, signature.wire_shape),
    }


def statistics(model: Measured) -> dict[str, Any]:
    """What ``model`` has done since it was loaded, added up now."""
    numbers = model.snapshot()
    executions = numbers.executions
    return {
        "name": model.name,
        "version": str(model.version),
        "last_inference": executions.last_inference_ms,
        "inference_count": executions.inference_count,
        "execution_count": executions.execution_count,
        "inference_stats": {
            "success": _duration(numbers.success),
            "fail": _duration(numbers.fail),
            "queue": _duration(executions.queue),
            "compute_input": _duration(executions.compute_input),
            "compute_infer": _duration(executions.compute_infer),
            "compute_output": _duration(executions.compute_output),
            "cache_hit": _duration(numbers.cache_hit),
            "cache_miss": _duration(numbers.cache_miss),
        },
        "response_stats": {},
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
