"""One broken interceptor per check. That check must fail. `Doorman` is the sound one."""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from headrace import (
    AnyOperation,
    Caller,
    HeadraceError,
    InferRequest,
    Interceptor,
    Meter,
    ModelView,
    Operation,
    Outcome,
    ResourceExhausted,
    ServerOptions,
    Unauthenticated,
    Watch,
    hookimpl,
)
from headrace_testing import InterceptorConformance, RefusedOperation
from headrace_testing.example import NAME


class Doorman(Interceptor):
    """Requires a header, waits for a moment, and admits three inferences at once."""

    name = "doorman"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self.taken = 0

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Awaitable[Watch | None] | None:
        if operation is not Operation.INFER or caller.transport in ("program", "model"):
            return None
        self.check(caller)
        return self.wait()

    def check(self, caller: Caller) -> None:
        if caller.header("word") != "please":
            raise Unauthenticated("say the word")

    async def wait(self) -> Watch | None:
        await asyncio.sleep(0)
        if self.taken == 3:
            raise ResourceExhausted("all seats are taken")
        self.taken += 1
        return Seat(self)


class Seat(Watch):
    def __init__(self, doorman: Doorman) -> None:
        self.doorman = doorman

    def ended(self, outcome: Outcome) -> None:
        self.doorman.taken -= 1


@pytest.fixture(autouse=True)
def installed(add_part: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    add_part("interceptors", lambda: Chosen.kind)
    monkeypatch.setattr(Chosen, "kind", Doorman)


class Chosen:
    """The interceptor of the test."""

    kind: ClassVar[type[Interceptor]] = Doorman


class TestDoorman(InterceptorConformance):
    plugin, interceptor = "headrace_doorman", "doorman"

    @pytest.fixture(autouse=True)
    def module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = SimpleNamespace(register_interceptors=hookimpl(lambda: [Chosen.kind]))
        monkeypatch.setitem(sys.modules, "headrace_doorman", module)

    def headers(self) -> Mapping[str, str]:
        return {"word": "please"}

    def refusals(self) -> Sequence[RefusedOperation]:
        return [RefusedOperation(Unauthenticated), RefusedOperation(ResourceExhausted, self.headers(), after=3)]


class Absent(Doorman):
    """Is not enabled."""

    @property
    def enabled(self) -> bool:
        return False


class Forgetful(Doorman):
    """Does not free the seats."""

    async def wait(self) -> Watch | None:
        await super().wait()
        return None


class Strict(Doorman):
    """Requires the header of models, too."""

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Awaitable[Watch | None] | None:
        self.check(caller)
        return None


class Trusting(Doorman):
    """Expects every caller to send the word."""

    def check(self, caller: Caller) -> None:
        if (caller.header("word") or "").index("please"):
            raise Unauthenticated("say the word only")


class Silent(Doorman):
    """Refuses without a text."""

    def check(self, caller: Caller) -> None:
        if caller.header("word") != "please":
            raise Unauthenticated


class Answers(Doorman):
    """Returns a boolean."""

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Any:
        return True


class Liar(Doorman):
    """Declares inference open to everybody."""

    def allowed_callers(self, operation: AnyOperation, transport: str) -> str:
        return ""


class AssumesPrincipal(Doorman):
    """Expects that every refused caller has a principal."""

    def refused(self, caller: Caller, error: HeadraceError) -> None:
        assert caller.principal


class Open(Doorman):
    """Admits everybody."""

    def check(self, caller: Caller) -> None: ...


class Sleeper(Doorman):
    """Blocks the event loop."""

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Awaitable[Watch | None] | None:
        time.sleep(0.15)  # the fault
        return super().admit(caller, operation, model)


class KeepsSeat(Doorman):
    """Takes the seat before it waits, and does not free it if the caller disconnects."""

    async def wait(self) -> Watch | None:
        if self.taken == 3:
            raise ResourceExhausted("all seats are taken")
        self.taken += 1
        await asyncio.sleep(0.01)
        return Seat(self)


class Redirects(Doorman):
    """Sends the request to another model."""

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        return InferRequest("other", request.inputs)


class ChangesRequest(Doorman):
    """Changes the request."""

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        request.parameters["seen"] = True  # type: ignore[index]
        return None


class RaisesInWatch(Doorman):
    """Its watch fails if an operation ends without an error."""

    async def wait(self) -> Watch | None:
        return RaisingWatch()


class RaisingWatch(Watch):
    def ended(self, outcome: Outcome) -> None:
        raise ValueError(outcome.error)


class HasRecorder(Doorman):
    """Has a sound recorder."""

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self.recorder = SimpleNamespace(add=self.add)

    def add(self, record: tuple[Any, ...]) -> None:
        """Take ``record``."""


class AssumesExecution(HasRecorder):
    """Expects that each inference was executed."""

    def add(self, record: tuple[Any, ...]) -> None:
        assert record[-1] is not None


class BlocksInRecorder(HasRecorder):
    """Writes each record at once."""

    def add(self, record: tuple[Any, ...]) -> None:
        time.sleep(0.12)  # the fault


class Permits(Doorman):
    """Permits every admitted caller, as another principal."""

    who = "guest"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self.permits: dict[str | bytes, dict[str, str]] = {}

    def check(self, caller: Caller) -> None:
        super().check(caller)
        self.permits[caller.header("authorization") or ""] = {NAME: self.who}


class PermitsAll(Permits):
    """Permits also callers that it refuses."""

    who = ""

    def check(self, caller: Caller) -> None:
        self.permits[caller.header("authorization") or ""] = {}
        super().check(caller)


class CountsNothing(Doorman, Meter):
    """Begins all inferences of its meter, and counts none."""

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self.meters = {(("127.0.0.1",), NAME): self}

    def begin(self, model: ModelView, size_bytes: int) -> bool:
        return True

    def end(self) -> None:
        pass

    def take_back(self, size_bytes: int) -> None:
        pass


def test_a_sound_recorder_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(register_interceptors=hookimpl(lambda: [HasRecorder]))
    monkeypatch.setitem(sys.modules, "headrace_doorman", module)
    TestDoorman().test_its_recorder_accepts_every_record_at_once()


class Late(Open):
    """Checks the caller after the body was read."""

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        super().check(caller)
        return None


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Absent, "its_options_enable_it"),
        (Forgetful, "an_admitted_caller_stays_admitted"),
        (RaisesInWatch, "an_admitted_caller_stays_admitted"),
        (Strict, "calls_of_models_for_an_admitted_caller_are_admitted"),
        (Trusting, "every_operation_has_a_verdict"),
        (Silent, "every_operation_has_a_verdict"),
        (Answers, "every_operation_has_a_verdict"),
        (AssumesPrincipal, "every_operation_has_a_verdict"),
        (Liar, "allowed_callers_agrees_with_the_refusals"),
        (Open, "it_refuses_the_declared_operations"),
        (Sleeper, "it_does_not_block_the_event_loop"),
        (AssumesExecution, "its_recorder_accepts_every_record_at_once"),
        (BlocksInRecorder, "its_recorder_accepts_every_record_at_once"),
        (Permits, "it_permits_only_admitted_callers"),
        (PermitsAll, "it_permits_only_admitted_callers"),
        (CountsNothing, "its_meters_agree_with_admit"),
        (KeepsSeat, "a_caller_that_disconnects_while_it_waits_does_not_count"),
        (Redirects, "intercept_does_not_change_the_request_or_its_model"),
        (ChangesRequest, "intercept_does_not_change_the_request_or_its_model"),
        (Late, "a_server_refuses_before_it_reads_the_body"),
    ],
)
def test_the_check_fails(kind: type[Doorman], check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(register_interceptors=hookimpl(lambda: [kind]))
    monkeypatch.setitem(sys.modules, "headrace_doorman", module)
    monkeypatch.setattr(Chosen, "kind", kind)
    run: Callable[..., None] = getattr(TestDoorman(), f"test_{check}")
    arguments = {"tmp_path": tmp_path, "transport": "http"}
    with pytest.raises((AssertionError, ValueError)):
        run(**{name: arguments[name] for name in inspect.signature(run).parameters})


def test_an_interceptor_without_an_entry_point_fails_with_the_entry_point(tmp_path: Path) -> None:
    class Hidden(TestDoorman):
        interceptor = "hidden"

    with pytest.raises(AssertionError, match=r"brings interceptor 'hidden'.*: hidden = \"headrace_doorman\""):
        Hidden().test_a_server_finds_it_and_serves_the_admitted(tmp_path)
