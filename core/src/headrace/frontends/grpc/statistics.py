"""``ModelStatistics``: what models have done since they were loaded (docs/spec/behaviours.md section 1.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.frontends.grpc import grpc_service_pb2 as pb
from headrace.frontends.grpc.context import Context
from headrace.models.served import ServedModel
from headrace.telemetry.statistics import BatchStatistics, Duration, Snapshot

if TYPE_CHECKING:
    from headrace.server import Server


async def model_statistics(
    server: Server, request: pb.ModelStatisticsRequest, context: Context
) -> pb.ModelStatisticsResponse:
    """One entry per version asked for; an empty name asks for everything that is ready."""
    models = server.statistics(request.name, request.version)
    return pb.ModelStatisticsResponse(model_stats=[_model(model) for model in models])


def _model(model: ServedModel) -> pb.ModelStatistics:
    snapshot = model.snapshot()
    executions = snapshot.executions
    return pb.ModelStatistics(
        name=model.name,
        version=str(model.version),
        last_inference=executions.last_inference_ms,
        inference_count=executions.inference_count,
        execution_count=executions.execution_count,
        inference_stats=_inferences(snapshot),
        batch_stats=[_batch(size, batch) for size, batch in sorted(executions.batches.items())],
    )


def _inferences(snapshot: Snapshot) -> pb.InferStatistics:
    executions = snapshot.executions
    return pb.InferStatistics(
        success=_duration(snapshot.success),
        fail=_duration(snapshot.fail),
        queue=_duration(executions.queue),
        compute_input=_duration(executions.compute_input),
        compute_infer=_duration(executions.compute_infer),
        compute_output=_duration(executions.compute_output),
        cache_hit=_duration(snapshot.cache_hit),
        cache_miss=_duration(snapshot.cache_miss),
    )


def _batch(size: int, batch: BatchStatistics) -> pb.InferBatchStatistics:
    return pb.InferBatchStatistics(
        batch_size=size,
        compute_input=_duration(batch.compute_input),
        compute_infer=_duration(batch.compute_infer),
        compute_output=_duration(batch.compute_output),
    )


def _duration(duration: Duration) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=duration.count, ns=duration.ns)
