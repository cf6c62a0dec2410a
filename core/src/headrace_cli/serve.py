"""``headrace serve``: listen, load, wait for a signal, drain, exit (docs/spec/behaviours.md sections 5.11 and 8)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import ClassVar, NoReturn

from anyio import create_task_group

from headrace.command import Command, complain
from headrace.config import support
from headrace.config.option_groups import OptionGroup
from headrace.config.options import ServerOptions
from headrace.errors import ConfigError, HeadraceError
from headrace.plugins import Plugins
from headrace.server import Server
from headrace.telemetry.logs import Log, LogSettings
from headrace_cli import command_line, startup, usage
from headrace_cli.garbage_collection import CollectionPolicy
from headrace_cli.import_time import without_collections
from headrace_cli.option_files import with_files
from headrace_cli.security.profile_words import with_profile
from headrace_cli.security.security_options import SecurityOptions
from headrace_cli.startup import log_openness
from headrace_cli.usage import FlagHelp
from headrace_hosts.held_memory import budget_of

log = logging.getLogger("headrace.serve")


class Serve(Command):
    """Its flags are parsed as by tritonserver, and not by argparse. Another program that serves is a subclass."""

    name = "serve"
    help = "serve the models of a repository"
    example = "headrace serve --model-repository=/srv/models"
    #: The default words of this program. Words of the command line override them.
    default_words: ClassVar[Sequence[str]] = ()

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the command line, with the flags of ``@files``. Raises SystemExit if one cannot be read."""
        try:
            return argparse.Namespace(words=with_profile([*self.default_words, *with_files(words)]))
        except ConfigError as error:
            raise SystemExit(self.refuse(error, [])) from None

    def check(self, words: Sequence[str]) -> ServerOptions:
        """Return the options in ``words`` by the rules of `run`, but without the environment. Nothing is started.

        If they are refused, prints the reason and raises SystemExit.
        """
        words, groups, faults = self.parse(words).words, list[type[OptionGroup]](), list[str]()
        try:
            plugins = find_plugins(words)
            faults = plugins.complaints
            groups = list(plugins.options)
            return command_line.read_options(words, {}, groups, plugins.interceptors)[0]
        except ConfigError as error:
            raise SystemExit(self.refuse(_with_faults(error, faults), groups)) from None

    @staticmethod
    def flags(groups: Sequence[type[OptionGroup]] = ()) -> list[FlagHelp]:
        """Return all flags in the order of ``headrace serve --help``, then the flags of ``groups``."""
        return usage.flag_helps(groups)

    def show_help(self, groups: Sequence[type[OptionGroup]]) -> int:
        """Print the help, with the options of plugins in ``groups``. Return the exit code."""
        print(usage.render(groups), end="")
        return 0

    def refuse(self, error: ConfigError, groups: Sequence[type[OptionGroup]]) -> int:
        """Print the reason why a command line is refused. Return the exit code."""
        return complain("headrace serve", "[options]", f"{error.message}{usage.of_bad_flag(error.message)}".rstrip())

    def run(self, arguments: argparse.Namespace) -> int:
        """Serve until SIGINT or SIGTERM. Return the exit code."""
        words, groups, faults = arguments.words, list[type[OptionGroup]](), list[str]()
        try:
            with without_collections():
                plugins = find_plugins(words)
            faults = plugins.complaints
            groups = list(plugins.options)
            if command_line.wants_help(words):
                return self.show_help(groups)
            options, warnings = command_line.read_options(words, os.environ, groups, plugins.interceptors)
            logs = _open_log(options)
        except ConfigError as error:
            return self.refuse(_with_faults(error, faults), groups)
        faulthandler.enable()
        try:
            with contextlib.closing(logs):
                for warning in (*warnings, *support.without_effect(options)):
                    log.warning("%s", warning)
                common = words, options, plugins
                work = _supervise(*common) if options.workers else _serve(*common, logs)
                return run_loop(work)
        finally:
            _flush_output()


def _with_faults(error: ConfigError, faults: Sequence[str]) -> ConfigError:
    """Return ``error`` with the faults of plugins if a flag is unknown: it may be a flag of a broken one."""
    is_unknown = error.message.startswith("unrecognized option")
    return command_line.WordError("\n".join((error.message, *faults))) if is_unknown and faults else error


def find_plugins(words: Sequence[str]) -> Plugins:
    """Return the plugins that ``words`` select."""
    return Plugins.discover(None if command_line.wants_help(words) else command_line.allowed_plugins(words))


def _open_log(options: ServerOptions) -> Log:
    try:
        return Log(LogSettings.from_options(options))
    except OSError as error:
        raise ConfigError(f'Bad option: "--log-file".\n{error}') from error


def run_loop(main: Coroutine[None, None, int]) -> int:
    try:
        import uvloop
    except ImportError:  # there are no wheels for Windows
        return asyncio.run(main)
    return uvloop.run(main)


async def _serve(words: Sequence[str], options: ServerOptions, plugins: Plugins, logs: Log) -> int:
    told_to_stop = asyncio.Event()
    _watch_signals(told_to_stop)
    try:
        server = Server(options, found_plugins=plugins)
        enforce_profile(server, words)
    except Exception as error:
        _complain(options, f"error: creating server: {_words(error)}")
        return 1
    server.engine.log = logs
    return await serve_until(told_to_stop, server)


def enforce_profile(server: Server, words: Sequence[str]) -> None:
    """Raise `ConfigError` if ``server``, with the command line ``words``, has an operation open that its profile
    closes.
    """
    if server.options.group(SecurityOptions).profile != "none":
        from headrace_cli.security.profiles import enforce

        enforce(server, words)


async def _supervise(words: Sequence[str], options: ServerOptions, plugins: Plugins) -> int:
    """Start and supervise worker processes until a signal (``--workers``). Return the exit code."""
    from headrace_cli.server_processes.supervisor import Supervisor

    if options.group(SecurityOptions).profile != "none":  # here, because no worker has the metrics page
        try:
            enforce_profile(Server(options, found_plugins=plugins), words)
        except Exception as error:
            _complain(options, f"error: creating server: {_words(error)}")
            return 1
    supervisor, told_to_stop = Supervisor(words, options), asyncio.Event()
    failures: list[Exception] = []
    _watch_signals(told_to_stop)

    async def serve() -> None:
        try:
            await supervisor.serve()
        except Exception as error:
            failures.append(error)
            told_to_stop.set()

    async with create_task_group() as serving:
        serving.start_soon(serve)
        await told_to_stop.wait()
        if not (failures or supervisor.all_serve):
            log.info("stopping before all workers serve")
        serving.cancel_scope.cancel()
    for failure in failures:
        _complain(options, f"error: creating server: {_words(failure)}")
    return await supervisor.stop() or len(failures)


async def serve_until(
    told_to_stop: asyncio.Event,
    server: Server,
    loaded: Callable[[], Awaitable[None]] | None = None,
    started: Callable[[], None] | None = None,
    *,
    logs_tables: bool = True,
) -> int:
    """Serve until ``told_to_stop`` is set, even if models are still loading. Return the exit code, or exit.

    ``loaded`` is awaited when the models are loaded, before shared ports are opened. ``started`` is called when the
    server accepts requests. With ``logs_tables``, the tables of models and options are logged.
    """
    options = server.options
    garbage = CollectionPolicy(asyncio.get_running_loop(), held_bytes=lambda: budget_of(server.engine).total_bytes)
    garbage.rest()
    server.plugins.register(garbage)
    is_starting, failures = True, list[Exception]()

    async def start() -> None:
        nonlocal is_starting
        try:
            await _start(server, garbage, loaded, logs_tables)
            if started is not None:
                started()
        except Exception as error:  # log any reason, and stop in order
            failures.append(error)
            told_to_stop.set()
        is_starting = False

    async with create_task_group() as starting:
        starting.start_soon(start)
        await told_to_stop.wait()
        if is_starting:
            log.info("stopping before all models are loaded")
            await _stop(server, wait_for_loads=False)
            _exit_now(0)  # a load cannot be interrupted
    for failure in failures:
        _complain(options, f"error: creating server: {_words(failure)}")
    garbage.close()
    await _stop(server)
    return _exit(server, len(failures))


def _watch_signals(told_to_stop: asyncio.Event) -> None:
    """Set the event on SIGINT and SIGTERM. Further signals are ignored, also while the interpreter exits.

    The loop's own handlers would not do: it removes them when it closes, and the default action ends the process.
    """
    loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def stop(name: str) -> None:
        log.info("signal %s: stopping", name)
        told_to_stop.set()

    def handle(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        loop.call_soon_threadsafe(stop, signal.Signals(number).name)

    for number in numbers:
        signal.signal(number, handle)


async def _start(
    server: Server, garbage: CollectionPolicy, loaded: Callable[[], Awaitable[None]] | None, logs_tables: bool
) -> None:
    """Open the ports and load the models: the ports first, unless ``--listen-while-loading=false``.

    Then a port in use is reported at once, and probes are answered meanwhile.
    """
    if logs_tables:
        server.when_ready(partial(startup.log_tables, server))
    await server.choose_frontends()  # report what is missing before a long load
    if server.options.listen_while_loading:
        await server.start_frontends()
    if logs_tables:
        log_openness(server.options)
    try:
        await server.start()
    except HeadraceError:
        startup.log_models(server)
        raise
    if loaded is not None:
        await loaded()
    await server.start_frontends()  # those that do not listen yet
    garbage.start()


async def _stop(server: Server, *, wait_for_loads: bool = True) -> None:
    try:
        await server.stop(wait_for_loads=wait_for_loads)
    except HeadraceError as error:
        _complain(server.options, error.message)
        _exit_now(1)


def _complain(options: ServerOptions, text: str) -> None:
    """Log why the server exits. Print it on stderr, too, if the log does not go there or has no errors."""
    log.error("%s", text)
    if options.log_file or not options.log_error:
        with contextlib.suppress(OSError):  # as in _flush_output
            print(text, file=sys.stderr, flush=True)


def _words(error: Exception) -> str:
    if isinstance(error, HeadraceError):
        return f"{error.code.value} - {error.message}"
    log.error("unexpected error", exc_info=error)
    return f"Internal - {type(error).__name__}: {error}"


def _exit(server: Server, code: int) -> int:
    """Return ``code``. If a thread still runs, exit with ``code`` at once: it would run while the interpreter ends."""
    if server.has_left_threads:
        _exit_now(code)
    return code


def _exit_now(code: int) -> NoReturn:
    """Exit the process without waiting for threads of engines."""
    logging.shutdown()
    _flush_output()
    os._exit(code)


def _flush_output() -> None:
    """Flush stdout and stderr. A full disk or a closed pipe does not change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # discard the rest: else the interpreter tries again and exits with 120
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
