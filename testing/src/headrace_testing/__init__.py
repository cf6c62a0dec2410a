"""The conformance kit: tests that every part of a kind passes, for the authors of plugins.

For a backend, subclass `BackendConformance`, name the plugin, and give one example of a model with its answers::

    class TestLightGBM(BackendConformance):
        plugin, backend, heavy = "headrace_lightgbm", "lightgbm", ("lightgbm",)

        @pytest.fixture
        def example(self, tmp_path):
            ...  # write a model file into tmp_path
            return Example(tmp_path, {"features": rows}, {"scores": expected}, damage="model.txt")

For a scheduler, subclass `SchedulerConformance` and declare its properties::

    class TestShortest(SchedulerConformance):
        plugin, scheduler = "headrace_shortest", "shortest"

For a frontend, subclass `FrontendConformance`, with the options of its port and a client::

    class TestLines(FrontendConformance):
        plugin, frontend = "headrace_lines", "lines"

        def options(self, port): ...  # fields of ServerOptions
        def infer(self, connection, model, x): ...  # over a socket

For a response cache, subclass `CacheConformance`, with its settings::

    class TestShelf(CacheConformance):
        plugin, cache = "headrace_shelf", "shelf"

        def settings(self): ...  # of --cache-config=shelf,...

For a storage, subclass `StorageConformance`, with a method that stores models::

    class TestZipped(StorageConformance):
        plugin, storage = "headrace_zipped", "zipped"

        def store(self, models): ...  # returns the URL

For a repository agent, subclass `AgentConformance`, with a method that prepares a model for it::

    class TestPacked(AgentConformance):
        plugin, agent = "headrace_packed", "packed"

        def prepare(self, files): ...  # returns the files in the repository, and the parameters

For a command, subclass `CommandConformance`, with arguments that succeed and arguments that fail::

    class TestGreet(CommandConformance):
        plugin, command = "headrace_greet", "greet"
        good, bad = ("you",), ("nobody",)

For an interceptor, subclass `InterceptorConformance`, with an admitted caller and refusals::

    class TestToken(InterceptorConformance):
        plugin, interceptor = "headrace_token", "token"

        def options(self): ...  # fields of ServerOptions
        def headers(self): ...  # of an admitted caller
        def refusals(self): ...  # instances of `RefusedOperation`

For an extension, subclass `ExtensionConformance`, with a method that calls it::

    class TestPlain(ExtensionConformance):
        plugin, extension = "headrace_plain", "plain"

        def ask(self, served): ...  # send requests over HTTP or gRPC, and check the responses

The plugin must be installed (``pip install -e .`` is enough): the kit finds it by its entry point,
as a server does. Checks of properties that the part does not claim are skipped and listed in the summary.
The package is also a pytest plugin: any test may use the fixtures ``write_model``, ``headrace_server`` and ``infer``.
"""

from __future__ import annotations

from headrace_testing.agent_checks import AgentChecks
from headrace_testing.backend_answers import Answers
from headrace_testing.backend_loading import Loading
from headrace_testing.backend_requests import Requests
from headrace_testing.cache_checks import CacheChecks
from headrace_testing.command_checks import CommandChecks
from headrace_testing.example import Example, extreme_values
from headrace_testing.extension_checks import ExtensionChecks, ServedExtension
from headrace_testing.frontend_checks import FrontendChecks
from headrace_testing.interceptor_checks import InterceptorChecks, RefusedOperation
from headrace_testing.scheduler_answers import ScheduledAnswers
from headrace_testing.scheduler_subject import ScheduledService
from headrace_testing.scheduler_times import ScheduledTimes
from headrace_testing.storage_checks import StorageChecks

__all__ = [
    "AgentConformance",
    "BackendConformance",
    "CacheConformance",
    "CommandConformance",
    "Example",
    "ExtensionConformance",
    "FrontendConformance",
    "InterceptorConformance",
    "RefusedOperation",
    "SchedulerConformance",
    "ServedExtension",
    "StorageConformance",
    "extreme_values",
]


class BackendConformance(Loading, Answers, Requests):
    """Every check of backends. A subclass sets ``plugin`` and ``backend``, its claims (see `Subject`), and a fixture.

    The fixture ``example`` returns an `Example`. Compute its answers by arithmetic, by the engine called directly, or
    better by another engine; not by the backend itself. Most checks run the backend directly, on their own threads.
    Checks of queues and protocols run a server in this process.
    """


class SchedulerConformance(ScheduledAnswers, ScheduledTimes, ScheduledService):
    """Every check of schedulers. A subclass sets ``plugin``, ``scheduler``, and its claims (see `ScheduledSubject`).

    Test a scheduler with several modes by several subclasses, each with its ``config``. The model queue is the real
    one. Checks move a manual clock: nothing sleeps, and delays are exact to the microsecond.
    """


class FrontendConformance(FrontendChecks):
    """Every check of frontends. A subclass sets ``plugin`` and ``frontend``, and implements `FrontendChecks`.

    The server is a real one in this process, with real sockets.
    """


class CacheConformance(CacheChecks):
    """Every check of response caches. A subclass sets ``plugin`` and ``cache``, and its settings (see
    `CacheChecks`)."""


class StorageConformance(StorageChecks):
    """Every check of storages. A subclass sets ``plugin`` and ``storage``, and stores models (see `StorageChecks`)."""


class AgentConformance(AgentChecks):
    """Every check of repository agents. A subclass sets ``plugin`` and ``agent``, and prepares a model (see
    `AgentChecks`)."""


class CommandConformance(CommandChecks):
    """Every check of commands. A subclass sets ``plugin``, ``command`` and arguments (see `CommandChecks`)."""


class InterceptorConformance(InterceptorChecks):
    """Every check of interceptors. A subclass sets ``plugin`` and ``interceptor``, an admitted caller, and refused
    operations (see `InterceptorChecks`). Most checks call the interceptor directly; two start a real server."""


class ExtensionConformance(ExtensionChecks):
    """Every check of extensions. A subclass sets ``plugin`` and ``extension``, and calls it (see `ExtensionChecks`).

    The server is a real one in this process, with real sockets.
    """
