"""One broken repository agent per check. That check must fail. `Reverses` is the sound one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from headrace import ConfigError, LoadError, RepositoryAgent, hookimpl
from headrace_testing import AgentConformance


class Reverses(RepositoryAgent):
    """Reverses the bytes of every file. A file that begins with ``!`` is damaged."""

    name = "reverses"
    refuses: ClassVar[bool] = True

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        super().__init__(model, parameters)
        if parameters:
            raise ConfigError("agent 'reverses' has no parameters")

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        return self.reverse(directory, new_directory())

    def reverse(self, directory: Path, into: Path) -> Path:
        for path in directory.rglob("*"):
            if path.is_file() and path.name != "config.pbtxt":
                target = into / path.relative_to(directory)
                target.parent.mkdir(parents=True, exist_ok=True)
                content = path.read_bytes()
                if self.refuses and content.startswith(b"!"):
                    raise LoadError(f"'{path.name}' is damaged")
                target.write_bytes(content[::-1])
        return into


@pytest.fixture(autouse=True)
def installed(add_part: Callable[..., None]) -> None:
    add_part("agents", lambda: Reverses)


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
    """Reverses nothing."""

    def reverse(self, directory: Path, into: Path) -> Path:
        return directory


class InPlace(Reverses):
    """Writes to the source directory."""

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        return self.reverse(directory, directory)


class Shares(Reverses):
    """Uses one directory for all loads."""

    shared: ClassVar[list[Path]] = []

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        self.shared.append(new_directory())
        return self.reverse(directory, self.shared[0])


class RaisesOnFailure(Reverses):
    """Expects every load to succeed."""

    def load_fail(self) -> None:
        raise ValueError("not expected")


class Mixes(Reverses):
    """Stores the directory of one load where another thread overwrites it."""

    both = threading.Barrier(2)
    directories: ClassVar[list[Path]] = []

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        self.directories.append(directory)
        self.both.wait(20)  # for another thread
        return self.reverse(self.directories[-1], new_directory())


class Careless(Reverses):
    """Accepts any parameters, and any file."""

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        super().__init__(model, {})

    def reverse(self, directory: Path, into: Path) -> Path:
        try:
            return super().reverse(directory, into)
        except LoadError:
            return into


class Removes(Reverses):
    """Removes the file that it refuses."""

    def reverse(self, directory: Path, into: Path) -> Path:
        try:
            return super().reverse(directory, into)
        except LoadError:
            (directory / "1" / "weights").unlink()
            raise


class Raw(Careless):
    """Raises errors without a readable text."""

    def reverse(self, directory: Path, into: Path) -> Path:
        raise KeyError("1/weights")


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Forwards, "load_returns_the_files_of_the_model"),
        (InPlace, "the_source_directory_is_not_changed"),
        (Shares, "two_loads_do_not_share_a_new_directory"),
        (RaisesOnFailure, "every_order_of_events_is_accepted"),
        (Mixes, "threads_load_concurrently"),
        (Careless, "wrong_parameters_are_refused"),
        (Careless, "a_damaged_model_is_refused_with_a_reason"),
        (Removes, "a_damaged_model_is_refused_with_a_reason"),
        (Raw, "a_damaged_model_is_refused_with_a_reason"),
    ],
)
def test_the_check_fails(kind: type[Reverses], check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(register_agents=hookimpl(lambda: [kind]))
    monkeypatch.setitem(sys.modules, "headrace_reverses", module)
    with pytest.raises((AssertionError, ValueError)):
        getattr(TestReverses(), f"test_{check}")(tmp_path)


def test_an_agent_without_an_entry_point_fails_with_the_entry_point(tmp_path: Path) -> None:
    class Hidden(TestReverses):
        agent = "hidden"

    with pytest.raises(AssertionError, match=r"brings agent 'hidden'.*: hidden = \"headrace_reverses\""):
        Hidden().test_a_server_finds_it_and_serves_its_files(tmp_path)


def test_a_server_that_loads_a_damaged_model_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reverses, "refuses", False)
    with pytest.raises(AssertionError, match="has loaded a damaged model"):
        TestReverses().test_a_server_finds_it_and_serves_its_files(tmp_path)
