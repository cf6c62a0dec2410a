"""One broken repository agent per check, each to be caught by the check that is meant for it; `Reverses` is sound."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from headrace import ConfigError, LoadError, RepositoryAgent, hookimpl
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace_testing import AgentConformance


class Reverses(RepositoryAgent):
    """Turns the bytes of every file round; one that begins with ``!`` is damaged."""

    name = "reverses"

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        super().__init__(model, parameters)
        if parameters:
            raise ConfigError("agent 'reverses' has no parameters")

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        return self.turn(directory, new_directory())

    def turn(self, directory: Path, into: Path) -> Path:
        for path in directory.rglob("*"):
            if path.is_file() and path.name != "config.pbtxt":
                target = into / path.relative_to(directory)
                target.parent.mkdir(parents=True, exist_ok=True)
                content = path.read_bytes()
                if content.startswith(b"!"):
                    raise LoadError(f"'{path.name}' is damaged")
                target.write_bytes(content[::-1])
        return into


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server finds `Reverses`, as if its distribution was installed."""
    discover = Plugins.discover

    def with_agent(*arguments: Any) -> Plugins:
        plugins = discover(*arguments)
        plugins.agents.add(Reverses, PluginInfo("reverses", "tests", "0"))
        return plugins

    monkeypatch.setattr(Plugins, "discover", with_agent)


class TestReverses(AgentConformance):
    plugin, agent = "headrace_reverses", "reverses"
    kind: type[RepositoryAgent] = Reverses

    @pytest.fixture(autouse=True)
    def module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = SimpleNamespace(register_agents=hookimpl(lambda: [self.kind]))
        monkeypatch.setitem(sys.modules, "headrace_reverses", module)

    def prepare(self, files: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
        return {path: content[::-1] for path, content in files.items()}, {}

    def damage(self, files: Mapping[str, bytes]) -> tuple[Mapping[str, bytes], Mapping[str, str]]:
        return {**self.prepare(files)[0], "1/weights": b"!"}, {}

    def wrong_parameters(self) -> Mapping[str, str]:
        return {"what": "ever"}


class Forwards(Reverses):
    """Turns nothing round."""

    def turn(self, directory: Path, into: Path) -> Path:
        return directory


class InPlace(Reverses):
    """Writes into the directory that it was given."""

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        return self.turn(directory, directory)


class Shares(Reverses):
    """Uses one directory for all loads."""

    shared: ClassVar[list[Path]] = []

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        self.shared.append(new_directory())
        return self.turn(directory, self.shared[0])


class Trips(Reverses):
    """Expects every load to succeed."""

    def load_fail(self) -> None:
        raise ValueError("not expected")


class Mixes(Reverses):
    """Keeps between two steps of a load what belongs to one."""

    both = threading.Barrier(2)
    given: ClassVar[list[Path]] = []

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        self.given.append(directory)
        self.both.wait(20)  # until another thread has come as far
        return self.turn(self.given[-1], new_directory())


class Careless(Reverses):
    """Takes any parameters, and any file."""

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        super().__init__(model, {})

    def turn(self, directory: Path, into: Path) -> Path:
        try:
            return super().turn(directory, into)
        except LoadError:
            return into


class Tidies(Reverses):
    """Removes what it has refused."""

    def turn(self, directory: Path, into: Path) -> Path:
        try:
            return super().turn(directory, into)
        except LoadError:
            (directory / "1" / "weights").unlink()
            raise


class Raw(Careless):
    """Raises errors without a readable text."""

    def turn(self, directory: Path, into: Path) -> Path:
        raise KeyError("1/weights")


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Forwards, "it_leaves_the_files_of_the_model"),
        (InPlace, "it_writes_nothing_into_the_directory_that_it_was_given"),
        (Shares, "two_loads_of_a_model_do_not_share_what_they_replace"),
        (Trips, "every_order_of_events_is_taken"),
        (Mixes, "threads_may_load_at_once"),
        (Careless, "parameters_that_cannot_be_right_are_refused"),
        (Careless, "a_model_that_is_damaged_is_refused_and_says_why"),
        (Tidies, "a_model_that_is_damaged_is_refused_and_says_why"),
        (Raw, "a_model_that_is_damaged_is_refused_and_says_why"),
    ],
)
def test_the_check_catches_it(
    kind: type[Reverses], check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(register_agents=hookimpl(lambda: [kind]))
    monkeypatch.setitem(sys.modules, "headrace_reverses", module)
    with pytest.raises((AssertionError, ValueError)):
        getattr(TestReverses(), f"test_{check}")(tmp_path)


def test_an_agent_that_no_server_would_find_is_told_of_its_entry_point(tmp_path: Path) -> None:
    class Hidden(TestReverses):
        agent = "hidden"

    with pytest.raises(AssertionError, match=r"brings agent 'hidden'.*: hidden = \"headrace_reverses\""):
        Hidden().test_a_server_finds_it_and_serves_what_it_leaves(tmp_path)


def test_a_server_that_serves_what_the_agent_must_refuse_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reverses, "turn", lambda self, directory, into: _copy_reversed(directory, into))
    with pytest.raises(AssertionError, match="has loaded a model that is damaged"):
        TestReverses().test_a_server_finds_it_and_serves_what_it_leaves(tmp_path)


def _copy_reversed(directory: Path, into: Path) -> Path:
    for path in directory.rglob("*"):
        if path.is_file() and path.name != "config.pbtxt":
            target = into / path.relative_to(directory)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes()[::-1])
    return into
