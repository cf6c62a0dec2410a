"""Quotas for Headrace: limits for each principal and model, and fair sharing of a busy model.

::

    headrace serve --quota-rate=50 --quota-in-flight=8 ...      the same limits for every caller
    headrace serve --quota-file=quotas.json ...                 limits and weights by principal and model

::

    Quotas            the interceptor: counts, refuses, queues                     (quotas_interceptor)
    QuotaBook         the content of a quota file: limits by principal and model   (quota_file)
    Tenant, Use       the use of one principal: of all models, and of one          (accounts, fair_gate)
    FairGate          admits as many requests to a model as fill its instances     (fair_gate)
    headrace quotas   checks a quota file, and prints the limits of a principal    (quotas_command)
"""

from __future__ import annotations

from headrace import Command, Interceptor, OptionGroup, hookimpl
from headrace_quotas.quota_options import QuotaOptions
from headrace_quotas.quotas_command import QuotasCommand
from headrace_quotas.quotas_interceptor import Quotas

__all__ = ["QuotaOptions", "Quotas", "QuotasCommand"]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [QuotaOptions]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [Quotas]


@hookimpl
def register_commands() -> list[type[Command]]:
    return [QuotasCommand]
