"""The conformance kit: tests that every part of a kind passes, for the authors of plugins.

For a backend, subclass `BackendConformance`, name the plugin, and give one example of a model with its answers::

    class TestLightGBM(BackendConformance):
        plugin, backend, heavy = "headrace_lightgbm", "lightgbm", ("lightgbm",)

        @pytest.fixture
        def example(self, tmp_path):
            ...  # write a model file into tmp_path
            return Example(tmp_path, {"features": rows}, {"scores": expected}, damage="model.txt")

For a scheduler, subclass `SchedulerConformance`, and say what it promises::

    class TestShortest(SchedulerConformance):
        plugin, scheduler = "headrace_shortest", "shortest"

For a frontend, subclass `FrontendConformance`, and say how to have it listen and how to ask it::

    class TestLines(FrontendConformance):
        plugin, frontend = "headrace_lines", "lines"

        def options(self, port): ...  # fields of ServerOptions
        def infer(self, connection, model, x): ...  # over a socket

For a response cache, subclass `CacheConformance`, and say with which settings it is made::

    class TestShelf(CacheConformance):
        plugin, cache = "headrace_shelf", "shelf"

        def settings(self): ...  # of --cache-config=shelf,...

For a storage, subclass `StorageConformance`, and say how models are stored in it::

    class TestZipped(StorageConformance):
        plugin, storage = "headrace_zipped", "zipped"

        def store(self, models): ...  # returns the URL

For a repository agent, subclass `AgentConformance`, and say how a model is prepared for it::

    class TestPacked(AgentConformance):
        plugin, agent = "headrace_packed", "packed"

        def prepare(self, files): ...  # returns the files in the repository, and the parameters

For a command, subclass `CommandConformance`, and say with which arguments it succeeds and fails::

    class TestGreet(CommandConformance):
        plugin, command = "headrace_greet", "greet"
        good, bad = ("you",), ("nobody",)

For an interceptor, subclass `InterceptorConformance`, and say who is admitted and what is refused::

    class TestToken(InterceptorConformance):
        plugin, interceptor = "headrace_token", "token"

        def options(self): ...  # fields of ServerOptions
        def headers(self): ...  # of a caller that is admitted
        def refusals(self): ...  # instances of `RefusedOperation`

For an extension, subclass `ExtensionConformance`, and say how it is asked::

    class TestPlain(ExtensionConformance):
        plugin, extension = "headrace_plain", "plain"

        def ask(self, served): ...  # over HTTP or gRPC, and asserts

The plugin must be installed (``pip install -e .`` is enough): the kit finds it by its entry point,
as a server does. Checks of what the part does not claim are skipped, and the summary says so.
pytest loads `headrace_testing.plugin` by itself: the fixtures ``write_model``, ``headrace_server``
and ``infer`` serve any test.
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

    The fixture ``example`` returns an `Example`. Its answers should not come from the backend itself, but from
    arithmetic, from the engine called directly, or better from another engine. Most checks run the backend directly, on
    threads of their own. Those about queues and protocols run a server in this process.
    """


class SchedulerConformance(ScheduledAnswers, ScheduledTimes, ScheduledService):
    """Every check of schedulers. A subclass sets ``plugin``, ``scheduler``, and its claims (see `ScheduledSubject`).

    A scheduler that runs in several ways is tested by several subclasses, each with its ``config``. The model queue is
    the real one. Time stands still until a check moves it: nothing sleeps, and delays are exact to the microsecond.
    """


class FrontendConformance(FrontendChecks):
    """Every check of frontends. A subclass sets ``plugin`` and ``frontend``, and implements `FrontendChecks`.

    It says how the frontend listens and how to send it a request. The server in this process and the sockets are real.
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
    """Every check of interceptors. A subclass sets ``plugin`` and ``interceptor``, and says who is admitted and what is
    refused (see `InterceptorChecks`). Most checks call the interceptor directly; two ask a real server."""


class ExtensionConformance(ExtensionChecks):
    """Every check of extensions. A subclass sets ``plugin`` and ``extension``, and says how it is asked (see
    `ExtensionChecks`). The server is a real one in this process, and so are the sockets.
    """
