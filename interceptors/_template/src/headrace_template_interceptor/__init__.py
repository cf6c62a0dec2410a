"""The interceptor ``template`` for Headrace: every caller needs a key."""

from __future__ import annotations

from dataclasses import dataclass, field
from hmac import compare_digest
from typing import ClassVar

from headrace import (
    AnyOperation,
    Caller,
    Interceptor,
    Operation,
    OptionGroup,
    Outcome,
    ServerOptions,
    Unauthenticated,
    Watch,
    hookimpl,
    rate_limited_logger,
)

log = rate_limited_logger(__name__)
OPEN = (Operation.LIVE, Operation.READY, Operation.METRICS)


@dataclass(frozen=True)
class TemplateOptions(OptionGroup):
    """Every caller needs a key."""

    name: ClassVar[str] = "template-caller"
    key: str = field(default="", metadata={"help": "The key, sent as 'Authorization: Bearer KEY'. Empty: no key."})


class Template(Interceptor):
    name = "template"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self._key = options.group(TemplateOptions).key

    @property
    def enabled(self) -> bool:
        return bool(self._key)

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch | None:
        if operation in OPEN or caller.transport in ("program", "model"):
            return None
        header = caller.header("authorization") or ""
        if not compare_digest(header.encode(), f"Bearer {self._key}".encode()):
            raise Unauthenticated("this server needs a key", challenge="Bearer")
        caller.principal = "key"
        return Log(caller)

    def allowed_callers(self, operation: AnyOperation, transport: str) -> str:
        return "" if operation in OPEN else "callers with the key"


class Log(Watch):
    """Logs an operation when it ends."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def ended(self, outcome: Outcome) -> None:
        ms = (outcome.ended_ns - outcome.begun_ns) / 1e6
        log.info("%s %s: %s after %.1f ms", self._caller.operation, self._caller.model, outcome.error or "done", ms)


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [TemplateOptions]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [Template]
