"""Checks of a repository agent: it returns a directory with the model, and does not change the one that it was
given."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np
import pytest

from headrace import HeadraceError, RepositoryAgent, Server
from headrace_testing.driving import error_of, part_of
from headrace_testing.example import NAME
from headrace_testing.serving import on_loop, serve
from headrace_testing.storage_checks import NewDirectories

#: The files in the repository, and the agent's parameters in the config.
Prepared: TypeAlias = "tuple[Mapping[str, bytes], Mapping[str, str]]"

_THREADS = 8
_CONFIG = f"""name: "{NAME}" backend: "identity" max_batch_size: 8
    input {{ name: "x" data_type: TYPE_FP32 dims: 3 }} output {{ name: "y" data_type: TYPE_FP32 dims: 3 }}"""
_FILES = {"1/weights": bytes(range(256)) * 64, "1/deep/part": b"\0\r\n", "2/weights": b"second", "labels.txt": b"a\n"}


class AgentChecks:
    """A subclass sets ``plugin``, the module of the entry point, and ``agent``, its name in configs.

    It may override `prepare` (how a model is prepared for the agent), `damage` (a model that the agent must refuse),
    and `wrong_parameters`.
    """

    plugin: ClassVar[str]
    agent: ClassVar[str]

    def prepare(self, files: Mapping[str, bytes]) -> Prepared:
        """Return the files in the repository, and the agent's parameters, for a model that has ``files`` in the end."""
        return files, {}

    def damage(self, files: Mapping[str, bytes]) -> Prepared | None:
        """Return a model that the agent must refuse to load; None if there is none."""
        return None

    def wrong_parameters(self) -> Mapping[str, str]:
        """Return parameters that the agent must refuse; empty if there are none."""
        return {}

    def make(self, parameters: Mapping[str, str]) -> RepositoryAgent:
        """Return the agent, created as by a server."""
        kind: type[RepositoryAgent] = part_of(self.plugin, "agent", self.agent)
        return kind(NAME, parameters)

    def test_it_leaves_the_files_of_the_model(self, tmp_path: Path) -> None:
        files, parameters = self.prepare(_FILES)
        left = self.make(parameters).load(_write(tmp_path / NAME, files), NewDirectories(tmp_path / "new", NAME))
        assert {path: content for path, content in _read(left).items() if path in _FILES} == _FILES

    def test_it_writes_nothing_into_the_directory_that_it_was_given(self, tmp_path: Path) -> None:
        files, parameters = self.prepare(_FILES)
        given = _write(tmp_path / NAME, files)
        agent = self.make(parameters)
        agent.load(given, NewDirectories(tmp_path / "new", NAME))
        agent.load_complete()
        agent.unload()
        agent.unload_complete()
        assert _read(given) == files

    def test_two_loads_of_a_model_do_not_share_what_they_replace(self, tmp_path: Path) -> None:
        """The old version is served while the new one is loaded."""
        files, parameters = self.prepare(_FILES)
        given, directories = _write(tmp_path / NAME, files), NewDirectories(tmp_path / "new", NAME)
        first, second = (self.make(parameters).load(given, directories) for _ in range(2))
        assert first == second == given or first != second

    def test_every_order_of_events_is_taken(self, tmp_path: Path) -> None:
        files, parameters = self.prepare(_FILES)
        given, directories = _write(tmp_path / NAME, files), NewDirectories(tmp_path / "new", NAME)
        for events in (("load_complete", "unload", "unload_complete"), ("load_fail",)):
            agent = self.make(parameters)
            agent.load(given, directories)
            for event in events:
                getattr(agent, event)()

    def test_threads_may_load_at_once(self, tmp_path: Path) -> None:
        def left(number: int) -> bytes:
            files, parameters = self.prepare({**_FILES, "2/weights": b"%d" % number})
            place = tmp_path / str(number)
            directory = self.make(parameters).load(_write(place / NAME, files), NewDirectories(place / "new", NAME))
            return (directory / "2/weights").read_bytes()

        with ThreadPoolExecutor(_THREADS) as pool:
            assert list(pool.map(left, range(_THREADS))) == [b"%d" % number for number in range(_THREADS)]

    def test_parameters_that_cannot_be_right_are_refused(self, tmp_path: Path) -> None:
        wrong = self.wrong_parameters()
        if not wrong:
            pytest.skip("it says of no parameters that they are refused")
        files, _ = self.prepare(_FILES)
        given = _write(tmp_path / NAME, files)
        error = error_of(lambda: self.make(wrong).load(given, NewDirectories(tmp_path / "new", NAME)))
        assert isinstance(error, HeadraceError), f"{dict(wrong)}: {error!r} instead of an error of Headrace"

    def test_a_model_that_is_damaged_is_refused_and_says_why(self, tmp_path: Path) -> None:
        damaged = self.damage(_FILES)
        if damaged is None:
            pytest.skip("it says of no model that it is damaged")
        files, parameters = damaged
        given = _write(tmp_path / NAME, files)
        error = error_of(lambda: self.make(parameters).load(given, NewDirectories(tmp_path / "new", NAME)))
        assert isinstance(error, HeadraceError), f"{error!r} instead of an error of Headrace"
        assert error.message, "the error says nothing"
        assert _read(given) == files, "it has changed the directory that it was given"

    def test_a_server_finds_it_and_serves_what_it_leaves(self, tmp_path: Path) -> None:
        files, parameters = self.prepare(_FILES)
        x = np.ones((1, 3), np.float32)
        self._store(tmp_path, files, parameters)
        with serve(tmp_path, model_control_mode="explicit", exit_on_error=False) as server:
            names = server.plugins.agents.names()
            assert self.agent in names, (
                f"no installed distribution brings agent '{self.agent}', only {', '.join(names)}; add an entry point "
                f'of the group headrace: {self.agent} = "{self.plugin}"'
            )
            on_loop(server, server.load(NAME))
            np.testing.assert_array_equal(np.asarray(server.infer(NAME, {"x": x}).outputs["y"]), x)
            (served,) = server.served(NAME)
            directory = served.model.path.parent
            assert (directory / "2/weights").read_bytes() == _FILES["2/weights"]
            self._require_refusal(server, tmp_path)
        assert directory == tmp_path / NAME or not directory.exists(), "a new directory is left when the model is gone"

    def _require_refusal(self, server: Server, repository: Path) -> None:
        """Check that a damaged model does not replace one that is served."""
        damaged = self.damage(_FILES)
        if damaged is not None:
            self._store(repository, *damaged)
            error = error_of(lambda: on_loop(server, server.load(NAME)))
            assert isinstance(error, HeadraceError), f"the server has loaded a model that is damaged: {error!r}"
            assert server.served(NAME), "the model that was served is gone"

    def _store(self, repository: Path, files: Mapping[str, bytes], parameters: Mapping[str, str]) -> None:
        told = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
        agents = f'model_repository_agents {{ agents {{ name: "{self.agent}" {told} }} }}'
        _write(repository / NAME, {**files, "config.pbtxt": f"{_CONFIG} {agents}".encode()})


def _write(directory: Path, files: Mapping[str, bytes]) -> Path:
    for path, content in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    return directory


def _read(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
