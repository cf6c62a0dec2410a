"""The events that agents receive, their order, and the directories that agents create."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.agents.base import RepositoryAgent
from headrace.errors import HeadraceError, LoadError
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace.server import Server
from tests.core.conftest import inspect

TWO_AGENTS = """
backend: "identity" max_batch_size: 8 version_policy { all { } }
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
model_repository_agents { agents [ { name: "first", parameters { key: "a" value: "b" } }, { name: "second" } ] }
"""
ONE = {"x": np.ones((1, 2), np.float32)}


class First(RepositoryAgent):
    """Records its events, and behaves as the test sets it up."""

    name = "first"
    events: ClassVar[list[str]] = []
    act: ClassVar[Callable[[RepositoryAgent, Path, Callable[[], Path]], Path]]
    directories: ClassVar[list[Path]] = []

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        self.note("load")
        self.directories.append(directory)
        return directory

    def load_complete(self) -> None:
        self.note("load_complete")

    def load_fail(self) -> None:
        self.note("load_fail")

    def unload(self) -> None:
        self.note("unload")
        assert self.directories[-1].is_dir(), "the directory is still there"

    def unload_complete(self) -> None:
        self.note("unload_complete")
        raise RuntimeError("this error is logged only")

    def note(self, event: str) -> None:
        self.events.append(f"{self.name} {event}")


class Second(First):
    name = "second"

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        super().load(directory, new_directory)
        return type(self).act(self, directory, new_directory)


def copy(agent: RepositoryAgent, directory: Path, new_directory: Callable[[], Path]) -> Path:
    """Copy the versions of ``directory`` and a version 7 into a directory of its own."""
    made = new_directory()
    for name in (*(path.name for path in directory.iterdir() if path.is_dir()), "7"):
        (made / name).mkdir()
        (made / name / "weights").write_text("w")
    First.directories.append(made)
    return made


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    discover = Plugins.discover

    def with_agents(*arguments: Any) -> Plugins:
        plugins = discover(*arguments)
        for kind in (First, Second):
            plugins.agents.add(kind, PluginInfo(kind.name, "tests", "0"))
        return plugins

    monkeypatch.setattr(Plugins, "discover", with_agents)
    monkeypatch.setattr(First, "act", staticmethod(copy), raising=False)
    yield
    First.events.clear()
    First.directories.clear()


def new_events() -> list[str]:
    events = list(First.events)
    First.events.clear()
    return events


def serve(make_server: Callable[..., Server]) -> Server:
    return make_server(model_control_mode="explicit", exit_on_error=False)


def on_loop(server: Server, work: Any) -> Any:
    import asyncio

    return asyncio.run_coroutine_threadsafe(work, server.loop).result(60)


def test_agents_are_notified_in_order_and_their_directory_exists_as_long_as_the_model(
    write_model: Any, make_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_model("m", TWO_AGENTS, (1, 2))
    with serve(make_server) as server:
        on_loop(server, server.load("m"))
        assert new_events() == ["first load", "second load", "second load_complete", "first load_complete"]
        made = First.directories[-1]
        assert First.directories == [path, path, made]
        assert sorted(model.version for model in server.served("m")) == [1, 2, 7], "the versions are those it has left"
        assert {model.model.path.parent for model in server.served("m")} == {made}
        on_loop(server, server.load("m"))
        assert new_events() == [], "a model that has not changed is not loaded again"
        (path / "1" / "new").write_text("x")
        on_loop(server, server.load("m"))
        assert {model.model.path.parent for model in server.served("m")} == {First.directories[-1]} != {made}
        server.infer("m", ONE)
    events = new_events()
    assert sorted(events[:4]) == sorted(["first load", "second load", "second load_complete", "first load_complete"])
    once = ["first unload", "second unload", "second unload_complete", "first unload_complete"]
    assert [event for event in events if "unload" in event] == [*once, *once]
    assert not made.exists()
    assert not First.directories[-1].exists()
    assert "repository agent 'second' of model 'm' failed in unload_complete" in caplog.messages


def test_agents_are_notified_of_a_later_failure_and_their_files_are_removed(
    write_model: Any, make_server: Callable[..., Server], gated: Any
) -> None:
    write_model("m", TWO_AGENTS.replace("identity", "gated"))
    gated.failing.add(7)
    with serve(make_server) as server, pytest.raises(HeadraceError, match="version 7 is broken"):
        on_loop(server, server.load("m"))
    assert new_events() == ["first load", "second load", "second load_fail", "first load_fail"]
    assert not First.directories[-1].exists()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (LoadError("not good"), "not good"),
        (OSError(2, "No such file"), "repository agent 'second' cannot load model 'm': FileNotFoundError"),
        (KeyError("k"), "repository agent 'second' failed for model 'm': KeyError: 'k'"),
    ],
)
def test_error_of_an_agent_fails_the_load_and_only_earlier_agents_are_notified(
    write_model: Any,
    make_server: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    text: str,
) -> None:
    def fail(agent: RepositoryAgent, directory: Path, new_directory: Callable[[], Path]) -> Path:
        First.directories.append(new_directory())
        raise error

    monkeypatch.setattr(First, "act", staticmethod(fail))
    write_model("m", TWO_AGENTS)
    with serve(make_server) as server, pytest.raises(HeadraceError) as refusal:
        on_loop(server, server.load("m"))
    assert refusal.value.message.startswith(f"failed to load 'm', failed to poll from model repository: {text}")
    assert new_events() == ["first load", "second load", "first load_fail"]
    assert not First.directories[-1].exists()


@pytest.mark.parametrize("what", ["link", "nothing"])
def test_a_directory_that_no_model_may_have_is_refused(
    write_model: Any,
    make_server: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    what: str,
) -> None:
    """An archive may hold a link to any file of the machine."""

    def unpack(agent: RepositoryAgent, directory: Path, new_directory: Callable[[], Path]) -> Path:
        if what == "nothing":
            return tmp_path / "nowhere"
        made = copy(agent, directory, new_directory)
        (made / "labels.txt").symlink_to("/etc/hostname")
        return made

    monkeypatch.setattr(First, "act", staticmethod(unpack))
    write_model("m", TWO_AGENTS)
    text = {"link": "'m/labels.txt' is a link that leads out of the model repository", "nothing": "is no directory"}
    with serve(make_server) as server, pytest.raises(HeadraceError, match=text[what]):
        on_loop(server, server.load("m"))
    assert new_events() == ["first load", "second load", "second load_fail", "first load_fail"]


def test_the_config_is_read_from_the_directory_of_the_last_agent(
    write_model: Any, make_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    def configured(agent: RepositoryAgent, directory: Path, new_directory: Callable[[], Path]) -> Path:
        made = copy(agent, directory, new_directory)
        (made / "config.pbtxt").write_text(TWO_AGENTS.replace("max_batch_size: 8", "max_batch_size: 3"))
        return made

    monkeypatch.setattr(First, "act", staticmethod(configured))
    write_model("m", TWO_AGENTS)
    with serve(make_server) as server:
        on_loop(server, server.load("m"))
        assert {model.max_batch_size for model in server.served("m")} == {3}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "checksum",
            "model 'm' needs a repository agent that is missing: The agent 'checksum' comes with the distribution "
            "headrace-checksum: pip install headrace-checksum; no plugin provides agent 'checksum'; installed: first",
        ),
        ("frist", "no plugin provides agent 'frist'; did you mean 'first'? installed: first, second"),
    ],
)
def test_a_missing_agent_is_named_with_the_package_that_has_it(
    write_model: Any, repository: Path, name: str, text: str
) -> None:
    write_model("m", TWO_AGENTS.replace('"second"', f'"{name}"'))
    with Server(repository, exit_on_error=False, plugins=()) as server:
        (entry,) = server.index()
        assert text in entry.reason
    assert new_events() == [], "no agent acts before all are known"
    for has_engines in (True, False):
        problems = inspect(repository, has_engines=has_engines, plugins=())
        assert any(problem.startswith("4: ") and text in problem for problem in problems), problems


def test_an_inspection_checks_the_directory_of_the_last_agent_and_removes_it(
    write_model: Any, repository: Path
) -> None:
    path: Path = write_model("m", TWO_AGENTS)
    (path / "1").rmdir()
    assert inspect(repository) == []
    assert {event.split()[1] for event in new_events()} == {"load", "load_complete", "unload", "unload_complete"}
    assert [each for each in First.directories if each != path and each.exists()] == []


def test_a_model_from_a_load_request_has_agents_too(
    make_server: Callable[..., Server], caplog: pytest.LogCaptureFixture, wait_until: Callable[..., None]
) -> None:
    caplog.set_level(logging.DEBUG)
    config = (
        '{"backend": "identity", "max_batch_size": 8, "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],'
        '"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],'
        '"model_repository_agents": {"agents": [{"name": "first"}, {"name": "second"}]}}'
    )
    parameters: Mapping[str, str | bytes] = {"config": config, "file:1/weights": b"w"}
    with serve(make_server) as server:
        on_loop(server, server.load("m", parameters))
        assert [model.version for model in server.served("m")] == [7], "the latest of what the agents have left"
        directory = First.directories[0]
        assert (directory / "1" / "weights").read_bytes() == b"w"
        on_loop(server, server.unload("m"))
        private = directory.parent.parent
        wait_until(lambda: [path.name for path in private.iterdir()] == [".lock"], "nothing of it is left")
    assert not directory.exists()
    assert not First.directories[-1].exists()
