"""The parts that come with core, registered through the same hooks as everybody else's."""

from __future__ import annotations

from penstock.backends.base import Backend
from penstock.frontends.base import Frontend
from penstock.hookspecs import hookimpl
from penstock.schedulers.base import Scheduler


@hookimpl
def register_backends() -> list[type[Backend]]:
    from penstock.backends.identity import Identity

    return [Identity]


@hookimpl
def register_schedulers() -> list[type[Scheduler]]:
    from penstock.schedulers.direct import DirectScheduler
    from penstock.schedulers.dynamic import DynamicScheduler

    return [DirectScheduler, DynamicScheduler]


@hookimpl
def register_frontends() -> list[type[Frontend]]:
    # In the order in which they start (behaviours.md section 8).
    from penstock.frontends.grpc.frontend import GrpcFrontend
    from penstock.frontends.http.frontend import HttpFrontend
    from penstock.frontends.metrics import MetricsFrontend

    return [GrpcFrontend, HttpFrontend, MetricsFrontend]
