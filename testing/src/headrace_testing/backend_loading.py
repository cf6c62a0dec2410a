"""Checks of import, load, parameters and reload."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from headrace import Backend, LoadError, Tensor
from headrace_testing.driving import Subject, assert_installed, error_of
from headrace_testing.example import NAME, Example, assert_same, write_model
from headrace_testing.serving import on_loop, serve

_IMPORT = "import sys, json, importlib; importlib.import_module(sys.argv[1]).register_backends(); "
_IMPORT += "print(json.dumps(sorted(sys.modules)))"
_SETTLING, _RELOADS = 10, 50


class Loading(Subject):
    """Checks before the first request and after the last."""

    def test_importing_the_plugin_imports_no_engine(self) -> None:
        if not self.heavy:
            self.not_claimed("no heavy modules are named, so the imports of the plugin are not checked")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT, self.plugin],
            capture_output=True, text=True, timeout=120, env=environment, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"importing '{self.plugin}' failed: {done.stderr[-2000:]}"
        found = sorted(set(self.heavy).intersection(json.loads(done.stdout.splitlines()[-1])))
        assert not found, f"importing '{self.plugin}' imports {', '.join(found)}: import them inside load"

    def test_a_server_finds_the_plugin(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        with serve(tmp_path_factory.mktemp("repository")) as server:
            assert_installed("backend", self.backend, self.plugin, server.plugins.backends.names())

    def test_instances_are_of_the_declared_classes(self, example: Example) -> None:
        instance_classes = self.backend_class.instance_classes
        if not instance_classes:
            self.not_claimed("the backend declares no instance_classes")
        with self.driver(example).loaded() as driven:
            found = type(driven.instance)
        assert issubclass(found, instance_classes), (
            f"an instance is a {found.__name__}, which is none of "
            f"{', '.join(each.__name__ for each in instance_classes)} (instance_classes)"
        )

    def test_a_damaged_model_file_is_a_load_error_naming_the_file(
        self, example: Example, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        if not example.damage:
            self.not_claimed("the example names no file to damage")
        version = tmp_path_factory.mktemp("damaged") / NAME / "1"
        write_model(version.parent.parent, "", example.path, NAME)
        (version / example.damage).write_bytes(b"\x00this is no model\xff")
        error = error_of(lambda: self._load_and_close(replace(example, path=version)))
        assert isinstance(error, LoadError), f"the damaged file gives {error!r}, not a LoadError"
        name = Path(example.damage).name
        assert name in error.message, f"the message does not name '{name}': {error.message}"

    def test_an_unknown_parameter_is_refused(self, example: Example, tmp_path_factory: pytest.TempPathFactory) -> None:
        parameters = self.backend_class.Parameters
        if parameters is Backend.Parameters:
            self.not_claimed("the backend declares no Parameters, so unknown ones pass")
        if any(field.metadata.get("prefix") == "" for field in fields(parameters)):
            self.not_claimed("models of the backend may have any parameter")
        config = example.describe(self.backend, self.max_batch)
        config.parameters["no_such_parameter"].string_value = "1"
        repository = tmp_path_factory.mktemp("repository")
        write_model(repository, config, example.path)
        with serve(repository, strict_parameters=True, exit_on_error=False) as server:
            (entry,) = server.index()
        assert entry.state == "UNAVAILABLE", "the parameter 'no_such_parameter' is accepted"
        message = entry.reason
        assert "no_such_parameter" in message, f"the message does not name the parameter: {message}"
        known = [field for field in fields(parameters) if field.metadata.get("key", field.name) in message]
        assert known, f"the message lists no known parameter: {message}"

    def test_fifty_reloads_keep_memory_files_and_threads_flat(self, example: Example) -> None:
        if not Path("/proc/self/statm").exists():
            self.not_claimed("memory is measured on Linux only")
        before = None
        for number in range(_RELOADS):
            if number == _SETTLING:
                before = _resources()
            with self.driver(example).loaded() as instance:
                instance.infer(example.given)
        assert before is not None
        after = _resources()
        grown = after[0] - before[0]
        assert grown <= self.reload_growth_bytes, f"{_RELOADS - _SETTLING} reloads added {grown >> 20} MiB of memory"
        assert after[1] <= before[1], f"reloads left {after[1] - before[1]} files open"
        assert after[2] <= before[2], f"reloads left {after[2] - before[2]} threads running"

    def test_version_2_replaces_1_under_load(self, example: Example, tmp_path_factory: pytest.TempPathFactory) -> None:
        repository = tmp_path_factory.mktemp("repository")
        explicit: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",)}
        with self.serving(example, repository, **explicit) as server:
            write_model(repository, example.describe(self.backend, self.max_batch), example.path, version=2)
            with _load(lambda: dict(server.infer(NAME, example.given).outputs), example):
                on_loop(server, server.load(NAME))
            assert server.ready_versions(NAME) == [2]

    def _load_and_close(self, example: Example) -> None:
        with self.driver(example).loaded():
            pass


def _resources() -> tuple[int, int, int]:
    """Return resident bytes, open files and threads of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (sum(1 for _ in Path("/proc/self", each).iterdir()) for each in ("fd", "task"))
    return pages * os.sysconf("SC_PAGE_SIZE"), files, threads


@contextmanager
def _load(infer: Callable[[], dict[str, Tensor]], example: Example) -> Iterator[None]:
    """Send requests from two threads until the context ends. Fail if a request fails."""
    stopped = threading.Event()
    failures: list[Exception] = []

    def send() -> None:
        while not stopped.is_set():
            try:
                assert_same(infer(), example.expected, example.tolerance, "an answer during the reload")
            except Exception as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert not failures, f"a request failed during the reload: {failures[0]!r}"
