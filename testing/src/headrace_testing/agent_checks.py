"""Checks of a repository agent: it returns a directory with the model, and does not change the source directory."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeAlias

import numpy as np
import pytest

from headrace import HeadraceError, RepositoryAgent, Server
from headrace_testing.driving import assert_installed, error_of, part_of
from headrace_testing.example import NAME
from headrace_testing.plugin import NOT_RUN
from headrace_testing.serving import on_loop, serve
from headrace_testing.storage_checks import NewDirectories, read_files

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
        """Return the repository's files, and the parameters, from which the agent makes a model of ``files``."""
        return files, {}

    def damage(self, files: Mapping[str, bytes]) -> Prepared | None:
        """Return a model that the agent must refuse to load; None if there is none."""
        return None

    def wrong_parameters(self) -> Mapping[str, str]:
        """Return parameters that the agent must refuse; empty if there are none."""
        return {}

    def make(self, parameters: Mapping[str, str]) -> RepositoryAgent:
        """Return the agent, created as a server does."""
        kind: type[RepositoryAgent] = part_of(self.plugin, "agent", self.agent)
        return kind(NAME, parameters)

    def test_load_returns_the_files_of_the_model(self, tmp_path: Path) -> None:
        files, parameters = self.prepare(_FILES)
        loaded = self.make(parameters).load(_write(tmp_path / NAME, files), NewDirectories(tmp_path / "new", NAME))
        assert {path: content for path, content in read_files(loaded).items() if path in _FILES} == _FILES

    def test_the_source_directory_is_not_changed(self, tmp_path: Path) -> None:
        files, parameters = self.prepare(_FILES)
        source = _write(tmp_path / NAME, files)
        agent = self.make(parameters)
        agent.load(source, NewDirectories(tmp_path / "new", NAME))
        agent.load_complete()
        agent.unload()
        agent.unload_complete()
        assert read_files(source) == files

    def test_two_loads_do_not_share_a_new_directory(self, tmp_path: Path) -> None:
        """The old version is in use while the new one loads."""
        files, parameters = self.prepare(_FILES)
        source, directories = _write(tmp_path / NAME, files), NewDirectories(tmp_path / "new", NAME)
        first, second = (self.make(parameters).load(source, directories) for _ in range(2))
        assert first == second == source or first != second

    def test_every_order_of_events_is_accepted(self, tmp_path: Path) -> None:
        files, parameters = self.prepare(_FILES)
        source, directories = _write(tmp_path / NAME, files), NewDirectories(tmp_path / "new", NAME)
        for events in (("load_complete", "unload", "unload_complete"), ("load_fail",)):
            agent = self.make(parameters)
            agent.load(source, directories)
            for event in events:
                getattr(agent, event)()

    def test_threads_load_concurrently(self, tmp_path: Path) -> None:
        def loaded(number: int) -> bytes:
            files, parameters = self.prepare({**_FILES, "2/weights": b"%d" % number})
            folder = tmp_path / str(number)
            directory = self.make(parameters).load(_write(folder / NAME, files), NewDirectories(folder / "new", NAME))
            return (directory / "2/weights").read_bytes()

        with ThreadPoolExecutor(_THREADS) as pool:
            assert list(pool.map(loaded, range(_THREADS))) == [b"%d" % number for number in range(_THREADS)]

    def test_wrong_parameters_are_refused(self, tmp_path: Path) -> None:
        wrong = self.wrong_parameters()
        if not wrong:
            pytest.skip(f"{NOT_RUN}{self.agent}: it names no wrong parameters")
        files, _ = self.prepare(_FILES)
        source = _write(tmp_path / NAME, files)
        error = error_of(lambda: self.make(wrong).load(source, NewDirectories(tmp_path / "new", NAME)))
        assert isinstance(error, HeadraceError), f"{dict(wrong)}: {error!r} instead of an error of Headrace"

    def test_a_damaged_model_is_refused_with_a_reason(self, tmp_path: Path) -> None:
        damaged = self.damage(_FILES)
        if damaged is None:
            pytest.skip(f"{NOT_RUN}{self.agent}: it names no damaged model")
        files, parameters = damaged
        source = _write(tmp_path / NAME, files)
        error = error_of(lambda: self.make(parameters).load(source, NewDirectories(tmp_path / "new", NAME)))
        assert isinstance(error, HeadraceError), f"{error!r} instead of an error of Headrace"
        assert error.message, "the error has no message"
        assert read_files(source) == files, "it has changed the source directory"

    def test_a_server_finds_it_and_serves_its_files(self, tmp_path: Path) -> None:
        files, parameters = self.prepare(_FILES)
        x = np.ones((1, 3), np.float32)
        self._store(tmp_path, files, parameters)
        with serve(tmp_path, model_control_mode="explicit", exit_on_error=False) as server:
            assert_installed("agent", self.agent, self.plugin, server.plugins.agents.names())
            on_loop(server, server.load(NAME))
            np.testing.assert_array_equal(np.asarray(server.infer(NAME, {"x": x}).outputs["y"]), x)
            (served,) = server.served(NAME)
            directory = served.model.path.parent
            assert (directory / "2/weights").read_bytes() == _FILES["2/weights"]
            self._require_refusal(server, tmp_path)
        assert directory == tmp_path / NAME or not directory.exists(), (
            "a new directory remains after the model is unloaded"
        )

    def _require_refusal(self, server: Server, repository: Path) -> None:
        """Check that a damaged model does not replace a served one."""
        damaged = self.damage(_FILES)
        if damaged is not None:
            self._store(repository, *damaged)
            error = error_of(lambda: on_loop(server, server.load(NAME)))
            assert isinstance(error, HeadraceError), f"the server has loaded a damaged model: {error!r}"
            assert server.served(NAME), "the old version is no longer served"

    def _store(self, repository: Path, files: Mapping[str, bytes], parameters: Mapping[str, str]) -> None:
        text = " ".join(f'parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
        agents = f'model_repository_agents {{ agents {{ name: "{self.agent}" {text} }} }}'
        _write(repository / NAME, {**files, "config.pbtxt": f"{_CONFIG} {agents}".encode()})


def _write(directory: Path, files: Mapping[str, bytes]) -> Path:
    for path, content in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    return directory
