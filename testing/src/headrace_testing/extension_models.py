"""A plugin for the test of an extension: backends that double their input, and an interceptor that refuses."""

from __future__ import annotations

from typing import ClassVar

from headrace import AnyOperation, Backend, Caller, HeadraceError, Interceptor, hookimpl
from headrace_testing.frontend_models import Doubling, WaitingDoubling


class Refusing(Interceptor):
    """Raises ``refusal`` unless it is None."""

    name: ClassVar[str] = "refusing"
    refusal: ClassVar[HeadraceError | None] = None

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        if self.refusal is not None:
            raise self.refusal


@hookimpl
def register_backends() -> list[type[Backend]]:
    return [Doubling, WaitingDoubling]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [Refusing]
