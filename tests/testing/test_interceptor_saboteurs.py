"""One broken interceptor per check, each to be caught by the check that is meant for it; `Doorman` is sound."""

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
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace_testing import InterceptorConformance, RefusedOperation
from headrace_testing.example import NAME


class Doorman(Interceptor):
    """Asks for a word, lets each caller wait for a moment, and has three seats for inferences."""

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
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server that listens finds `Doorman`, as if its distribution was installed."""
    discover = Plugins.discover

    def with_interceptor(*arguments: Any) -> Plugins:
        plugins = discover(*arguments)
        plugins.interceptors.add(Chosen.kind, PluginInfo("doorman", "tests", "0"))
        return plugins

    monkeypatch.setattr(Plugins, "discover", with_interceptor)
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
    """Does not give the seats back."""

    async def wait(self) -> Watch | None:
        await super().wait()
        return None


class Strict(Doorman):
    """Asks models for the word, too."""

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
    """Says yes and no."""

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Any:
        return True


class Liar(Doorman):
    """Tells that everybody may infer."""

    def who_may(self, operation: AnyOperation, transport: str) -> str:
        return ""


class Hasty(Doorman):
    """Expects that every caller who is refused has a principal."""

    def refused(self, caller: Caller, error: HeadraceError) -> None:
        assert caller.principal


class Open(Doorman):
    """Lets everybody in."""

    def check(self, caller: Caller) -> None: ...


class Sleeper(Doorman):
    """Keeps the event loop."""

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Awaitable[Watch | None] | None:
        time.sleep(0.15)  # what the check is there to find
        return super().admit(caller, operation, model)


class Keeps(Doorman):
    """Takes the seat before it waits, and does not give it back if the caller leaves."""

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


class Scribbles(Doorman):
    """Writes into the request that it was given."""

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        request.parameters["seen"] = True  # type: ignore[index]
        return None


class Trips(Doorman):
    """Its watch fails if an operation ends without an error."""

    async def wait(self) -> Watch | None:
        return TrippingWatch()


class TrippingWatch(Watch):
    def ended(self, outcome: Outcome) -> None:
        raise ValueError(outcome.error)


class Notes(Doorman):
    """Has a recorder that is sound."""

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self.recorder = SimpleNamespace(add=self.add)

    def add(self, record: tuple[Any, ...]) -> None:
        """Take ``record``."""


class Assumes(Notes):
    """Expects that each inference was executed."""

    def add(self, record: tuple[Any, ...]) -> None:
        assert record[-1] is not None


class Dawdles(Notes):
    """Writes each record at once."""

    def add(self, record: tuple[Any, ...]) -> None:
        time.sleep(0.12)  # what the check is there to find


class Permits(Doorman):
    """Permits whoever was asked once, as another principal if it was admitted."""

    who = "guest"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self.permits: dict[str | bytes, dict[str, str]] = {}

    def check(self, caller: Caller) -> None:
        super().check(caller)
        self.permits[caller.header("authorization") or ""] = {NAME: self.who}


class PermitsAll(Permits):
    """Permits also those that it refuses."""

    who = ""

    def check(self, caller: Caller) -> None:
        self.permits[caller.header("authorization") or ""] = {}
        super().check(caller)


class Lavish(Doorman, Meter):
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
    module = SimpleNamespace(register_interceptors=hookimpl(lambda: [Notes]))
    monkeypatch.setitem(sys.modules, "headrace_doorman", module)
    TestDoorman().test_its_recorder_takes_every_record_at_once()


class Late(Open):
    """Judges the caller when the body has been read."""

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        super().check(caller)
        return None


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Absent, "its_options_enable_it"),
        (Forgetful, "an_admitted_caller_stays_admitted"),
        (Trips, "an_admitted_caller_stays_admitted"),
        (Strict, "the_models_that_an_admitted_caller_reaches_are_admitted"),
        (Trusting, "every_operation_has_a_verdict"),
        (Silent, "every_operation_has_a_verdict"),
        (Answers, "every_operation_has_a_verdict"),
        (Hasty, "every_operation_has_a_verdict"),
        (Liar, "who_may_do_an_operation_agrees_with_what_is_refused"),
        (Open, "what_it_must_refuse_is_refused"),
        (Sleeper, "it_does_not_block_the_event_loop"),
        (Assumes, "its_recorder_takes_every_record_at_once"),
        (Dawdles, "its_recorder_takes_every_record_at_once"),
        (Permits, "it_permits_those_that_it_admits"),
        (PermitsAll, "it_permits_those_that_it_admits"),
        (Lavish, "its_meters_count_as_it_does"),
        (Keeps, "a_caller_that_leaves_while_it_waits_leaves_nothing"),
        (Redirects, "a_request_is_kept_or_replaced_by_one_for_the_same_model"),
        (Scribbles, "a_request_is_kept_or_replaced_by_one_for_the_same_model"),
        (Late, "a_server_refuses_before_it_reads_the_body"),
    ],
)
def test_the_check_catches_it(kind: type[Doorman], check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(register_interceptors=hookimpl(lambda: [kind]))
    monkeypatch.setitem(sys.modules, "headrace_doorman", module)
    monkeypatch.setattr(Chosen, "kind", kind)
    run: Callable[..., None] = getattr(TestDoorman(), f"test_{check}")
    given = {"tmp_path": tmp_path, "transport": "http"}
    with pytest.raises((AssertionError, ValueError)):
        run(**{name: given[name] for name in inspect.signature(run).parameters})


def test_an_interceptor_that_no_server_would_find_is_told_of_its_entry_point(tmp_path: Path) -> None:
    class Hidden(TestDoorman):
        interceptor = "hidden"

    with pytest.raises(AssertionError, match=r"brings interceptor 'hidden'.*: hidden = \"headrace_doorman\""):
        Hidden().test_a_server_finds_it_and_serves_the_admitted(tmp_path)
