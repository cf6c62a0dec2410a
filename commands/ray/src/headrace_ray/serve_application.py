"""The application of Ray Serve. Ray is imported at its creation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from headrace import ConfigError, HeadraceError, ServerOptions
from headrace_ray.replica import App, Replica

if TYPE_CHECKING:
    from ray.serve import Application

#: The maximum requests of a replica. Ray's default, 5, is too few to form batches.
MAX_ONGOING_REQUESTS = 100
#: The interval at which the metrics of a replica are sent to Ray.
METRICS_S = 5.0


def deployment(
    model_repository: str | PathLike[str] | ServerOptions,
    *,
    models_per_replica: int = 0,
    name: str = "headrace",
    **settings: Any,
) -> Application:
    """Return an application of Ray Serve whose replicas serve ``model_repository``.

    The repository must exist on every node: a shared volume or a cloud URL. With
    ``models_per_replica``, a replica loads a model at its first request, and keeps the last ones used (Ray's model
    multiplexing). ``settings`` are those of ``serve.deployment``, such as ``num_replicas``, ``autoscaling_config`` or
    ``ray_actor_options``.

    Raises `ConfigError` for options that a replica cannot have.
    """
    if isinstance(model_repository, ServerOptions):
        options = model_repository
    else:
        mode = "explicit" if models_per_replica else "none"
        options = ServerOptions(model_repository=(fspath(model_repository),), model_control_mode=mode)
    _check(options, models_per_replica)
    from ray import serve

    replica = serve.ingress()(_replica_class(models_per_replica))
    made = serve.deployment(**{"name": name, "max_ongoing_requests": MAX_ONGOING_REQUESTS, **settings})(replica)
    return made.bind(options)


def application(arguments: dict[str, Any]) -> Application:
    """Return `deployment` for the ``args`` of a config of Ray Serve, whose ``import_path`` is this function."""
    return deployment(**arguments)


def _check(options: ServerOptions, models_per_replica: int) -> None:
    if options.workers:
        raise ConfigError(f"--workers={options.workers} is refused in a replica: ask Ray for more replicas")
    if models_per_replica < 0:
        raise ConfigError(f"models_per_replica is {models_per_replica}: it is 0, or the models that a replica keeps")
    if models_per_replica and options.model_control_mode != "explicit":
        raise ConfigError(
            f"models_per_replica={models_per_replica} needs --model-control-mode=explicit, "
            f"not '{options.model_control_mode}': Ray decides what is loaded"
        )


def _replica_class(models_per_replica: int) -> type[Replica]:
    from ray import serve

    class ServeReplica(Replica):
        """A replica on Ray. Ray awaits ``__init__`` and ``__del__`` on the event loop of the requests."""

        async def __init__(self, options: ServerOptions) -> None:  # type: ignore[misc]
            super().__init__(options)
            await self.start()
            self._publishing = asyncio.ensure_future(_publish(self))

        async def __del__(self) -> None:
            self._publishing.cancel()
            await self.stop()

        def __serve_build_asgi_app__(self) -> App:
            return self.app()

    if not models_per_replica:
        return ServeReplica

    class MultiplexedReplica(ServeReplica):
        """A replica that loads models when requests need them."""

        async def use(self, model: str) -> None:
            # A model that cannot be loaded is refused as one that is not there; the log has the reason.
            with contextlib.suppress(HeadraceError):
                await self.loaded(serve.get_multiplexed_model_id() or model)

        @serve.multiplexed(max_num_models_per_replica=models_per_replica)  # type: ignore[untyped-decorator]
        async def loaded(self, model: str) -> _LoadedModel:
            await self.server.load(model)
            return _LoadedModel(self, model)

    return MultiplexedReplica


class _LoadedModel:
    """A model that Ray keeps. Ray awaits ``__del__`` when another one takes its place."""

    def __init__(self, replica: Replica, name: str) -> None:
        self._replica, self._name = replica, name

    async def __del__(self) -> None:
        with contextlib.suppress(HeadraceError):  # the server may be stopping
            await self._replica.server.unload(self._name)


async def _publish(replica: Replica) -> None:
    """Give the metrics of ``replica`` to Ray, which adds the labels of the replica, until cancelled."""
    from ray.serve.metrics import Gauge

    gauges: dict[str, Any] = {}
    while True:
        for name, help_text, labels, value in _samples(replica):
            if name not in gauges:
                gauges[name] = Gauge(name, description=help_text, tag_keys=tuple(labels))
            gauges[name].set(value, tags=labels)
        await asyncio.sleep(METRICS_S)


def _samples(replica: Replica) -> Iterable[tuple[str, str, dict[str, str], float]]:
    for family in replica.server.engine.collect():
        for sample in family.samples:
            yield sample.name, family.documentation, dict(sample.labels), sample.value
