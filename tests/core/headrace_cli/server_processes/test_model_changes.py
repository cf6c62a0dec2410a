"""A load by name is applied by all servers, or fails. A server that joins later applies it before it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import HeadraceError, InternalError, LoadError, NotFound, Unavailable
from headrace_cli.server_processes.model_changes import (
    Change,
    ModelChanges,
    SharedControl,
    apply,
    write_extension,
    write_load,
    write_unload,
)


class Recorded:
    """A server that makes changes, or refuses them with ``error``, once its gate is open."""

    def __init__(self, number: int, error: HeadraceError | None = None) -> None:
        self.name, self.is_dead, self.error = f"worker {number}", False, error
        self.has_work = True
        self.made: list[Change] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self, method: str, *arguments: Any) -> bool:
        assert method == "change"
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.made += arguments
        return self.has_work


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


A, B, GONE = write_load("a", {}), write_load("b", {"config": "{}"}), write_unload("a", False)


def test_all_servers_apply_a_change_and_later_ones_apply_the_last_change_of_each_model() -> None:
    async def scenario() -> None:
        changes, servers = ModelChanges(), [Recorded(0), Recorded(1)]
        for server in servers:
            assert await changes.join(server) == []
        for change in (A, B, GONE):
            await changes.make(change)
        assert [server.made for server in servers] == [[A, B, GONE]] * 2
        assert await changes.join(Recorded(0)) == [B, GONE]

    run(scenario())


def test_change_that_all_servers_refuse_is_refused_in_their_words_and_not_stored() -> None:
    async def scenario() -> None:
        changes = ModelChanges()
        for number in range(2):
            await changes.join(Recorded(number, LoadError(f"no, says {number}")))
        with pytest.raises(LoadError, match="no, says 0"):
            await changes.make(A)
        assert await changes.join(Recorded(0)) == []

    run(scenario())


def test_change_that_only_some_servers_make_is_an_error_with_their_names_and_reasons() -> None:
    async def scenario() -> None:
        changes = ModelChanges()
        for server in (Recorded(0), Recorded(1, LoadError("no memory"))):
            await changes.join(server)
        with pytest.raises(InternalError) as caught:
            await changes.make(A)
        assert caught.value.message == ("'a' has been loaded by 1 of 2 workers, which differ now; worker 1: no memory")

    run(scenario())


class Dying(Recorded):
    """Dies of the change."""

    async def ask(self, method: str, *arguments: Any) -> bool:
        self.is_dead = True
        raise Unavailable("it was killed")


def test_one_that_dies_meanwhile_is_no_failure_because_the_next_makes_it_first() -> None:
    async def scenario() -> None:
        changes = ModelChanges()
        for server in (Recorded(0), Dying(1)):
            await changes.join(server)
        await changes.make(A)
        assert await changes.join(Recorded(1)) == [A]

    run(scenario())


def test_change_fails_if_all_servers_have_died() -> None:
    async def scenario() -> None:
        changes = ModelChanges()
        await changes.join(Dying(0))
        for _ in range(2):  # while it dies, and afterwards
            with pytest.raises(Unavailable, match="every worker has died"):
                await changes.make(A)

    run(scenario())


def test_a_server_that_joins_during_a_change_gets_it() -> None:
    async def scenario() -> None:
        changes, slow = ModelChanges(), Recorded(0)
        await changes.join(slow)
        slow.gate.clear()
        making = asyncio.ensure_future(changes.make(A))
        await asyncio.sleep(0)
        joining = asyncio.ensure_future(changes.join(Recorded(1)))
        await asyncio.sleep(0)
        assert not joining.done()
        slow.gate.set()
        await making
        assert await joining == [A]

    run(scenario())


def test_of_an_extension_the_last_change_of_each_key_is_made_again() -> None:
    async def scenario() -> None:
        changes = ModelChanges()
        await changes.join(Recorded(0))
        settings = (("l", 1), ("i", False), ("l", 2))
        level, info, later = (write_extension("x", key, value, True) for key, value in settings)
        same_name = write_load("x", {})
        for change in (level, info, same_name, later):
            await changes.make(change)
        assert await changes.join(Recorded(0)) == [info, same_name, later]
        await changes.make(undone := write_extension("x", "i", None, False))
        assert undone not in await changes.join(joined := Recorded(0))
        assert await changes.join(joined) == [same_name, later], "what was undone is not made again, nor kept"
        await changes.join(Recorded(1, InternalError("no")))
        with pytest.raises(
            InternalError, match="'x' has been changed by 4 of 5 workers, which differ now; worker 1: no"
        ):
            await changes.make(level)

    run(scenario())


class Changed:
    """An extension that keeps the changes."""

    name = "x"

    def __init__(self) -> None:
        self.changes: list[Any] = []

    async def apply(self, change: Any) -> None:
        self.changes.append(change)


class RecordingControl:
    """Records the calls to a `Control`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.relay: Any = None

    async def load_here(self, name: str, parameters: Any) -> bool:
        self.calls.append(("load", name, parameters))
        return False

    async def unload_here(self, name: str, unload_dependents: bool) -> None:
        self.calls.append(("unload", name, unload_dependents))


def test_a_change_was_made_if_one_server_had_something_to_do() -> None:
    """In a mode without loads by name, a load concerns only the servers in which an instance has died."""

    async def scenario() -> None:
        changes, servers = ModelChanges(), [Recorded(0), Recorded(1)]
        for server in servers:
            await changes.join(server)
            server.has_work = False
        assert await changes.make(A) is False
        servers[1].has_work = True
        assert await changes.make(A) is True

    run(scenario())


def test_files_and_settings_arrive_as_they_were_sent() -> None:
    async def scenario() -> None:
        control: Any = RecordingControl()
        parameters: dict[str, str | bytes] = {"config": '{"a": "ü"}', "file:1/model.onnx": bytes(range(256))}
        engine: Any = SimpleNamespace(control=control, extensions=[Changed(), other := Changed()])
        other.name = "other"
        assert await apply(write_load("m", parameters), engine) is False
        await apply(write_unload("m", True), engine)
        await apply(write_extension("x", "key", {"a": 1}, True), engine)
        assert [each.changes for each in engine.extensions] == [[{"a": 1}], []]
        assert control.calls == [("load", "m", parameters), ("unload", "m", True)]

    run(scenario())


def test_a_server_applies_missed_changes_before_new_ones() -> None:
    async def scenario() -> None:
        control: Any = RecordingControl()
        answered = asyncio.get_running_loop().create_future()
        calls: list[tuple[Any, ...]] = []

        async def ask(*words: Any) -> Any:
            calls.append(words)
            return await answered if words == ("join",) else None

        engine: Any = SimpleNamespace(control=control, relay=None)
        shared = SharedControl(ask, engine)
        joining = asyncio.ensure_future(shared.join())
        await asyncio.sleep(0)
        making = asyncio.ensure_future(shared.make(GONE))
        await asyncio.sleep(0)
        assert control.calls == []
        answered.set_result([A])
        await asyncio.gather(joining, making)
        assert [call[:2] for call in control.calls] == [("load", "a"), ("unload", "a")]
        await control.relay.load("b", {"config": "{}"})
        await control.relay.unload("b", False)
        await engine.relay("x", "key", [1], True)
        assert calls[1:] == [
            ("make", B),
            ("make", write_unload("b", False)),
            ("make", ["extension", "x", ["key", [1], True]]),
        ]

    run(scenario())


def test_a_change_of_an_extension_that_can_not_be_made_again_stops_no_server(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(Changed):
        async def apply(self, change: Any) -> None:
            raise NotFound(f"no {change}")

    async def scenario() -> None:
        engine: Any = SimpleNamespace(control=RecordingControl(), relay=None, extensions=[Refusing()])

        async def ask(*words: Any) -> Any:
            return [write_extension("x", "key", "segment", True), A]

        await SharedControl(ask, engine).join()
        assert [call[:2] for call in engine.control.calls] == [("load", "a")]
        assert "a change of extension 'x' can not be repeated: no segment" in caplog.text

    run(scenario())
