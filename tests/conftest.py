"""Real ``headrace serve`` processes, for the tests that look at a server from the outside."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import http.client
import logging
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from headrace import plugins
from headrace.messages.request import InferRequest
from headrace.registry import PluginInfo

# Tests start a thousand processes of the same modules. Where byte code is not kept, most of a start is compiling them.
# For this process it is pytest's rewriting of assertions, half of the time that collecting all tests takes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# NumPy's BLAS starts a thread per core when it is imported, and each spins for 25 ms before it sleeps.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # the session `bare` has next to nothing
    from hypothesis import HealthCheck, settings

    # The machine may be busy: how long an example takes, or the making of it, says nothing about the code.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")

with contextlib.suppress(ImportError):
    from httpx._transports import default

    # Every httpx.get() reads the certificates of all authorities, in 23 ms of CPU. Tests ask without TLS, or give a
    # context of their own.
    default.create_ssl_context = functools.cache(default.create_ssl_context)  # type: ignore[attr-defined]


class _SearchOnce:
    """Replaces `plugins._installed`: it searches once, but each time for a test that adds a folder to ``sys.path``.

    Thousands of tests make a server, each of which reads the metadata of all distributions, in 10 to 20 ms of CPU.
    """

    def __init__(self) -> None:
        self._search = plugins._installed
        self._path = list(sys.path)
        self._found: list[tuple[PluginInfo, EntryPoint]] | None = None

    def __call__(self) -> list[tuple[PluginInfo, EntryPoint]]:
        if sys.path != self._path:
            return self._search()
        if self._found is None:
            self._found = self._search()
        # Each server notes in these what it finds wrong.
        return [(PluginInfo(one.name, one.distribution, one.version), entry) for one, entry in self._found]


plugins._installed = _SearchOnce()


def _assign_once(request: InferRequest, name: str, value: object) -> None:
    """Refuse a second assignment to a field of a request. Only in the tests: in the server it would cost too much."""
    if name not in ("_execution", "_sender") and hasattr(request, name):
        raise AttributeError(f"a request never changes: '{name}' of {request.log_id}has been assigned to")
    object.__setattr__(request, name, value)


InferRequest.__setattr__ = _assign_once  # type: ignore[assignment, method-assign]

HEADRACE = Path(sys.executable).with_name("headrace")
#: The machine may be busy: a deadline only ends what hangs.
DEADLINE_S = 90.0
#: For models that have an environment made for them.
LOAD_DEADLINE_S = 2 * DEADLINE_S
#: Said when a port is listened on, before the models are loaded, and once more when they are.
_LISTENING = re.compile(r"(GRPCInferenceService|HTTPService|Metrics Service) (?:listens )?at [\w.]+:(\d+)")
#: What asyncio and the interpreter write about tasks, futures, generators and callbacks that nothing owns or awaits.
COMPLAINT = re.compile(
    r"Task was destroyed but it is pending|exception was never retrieved|was never awaited"
    r"|generator is already running|Exception in callback|[Uu]nhandled exception|Exception ignored in"
)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Engines and tests are a million objects that stay. Looking through them for garbage takes a quarter of the time
    of collecting the tests, and a third of a second at each full collection of garbage afterwards."""
    gc.disable()
    try:
        with _after_the_first(session.config):
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _after_the_first(config: pytest.Config) -> Iterator[None]:
    """Let the first of several test processes collect alone: it writes the compiled modules that the others read.

    In a clean checkout, compiling takes longer than all else that collecting is.
    """
    if not hasattr(config, "workerinput"):
        yield
        return
    with Path(config.option.basetemp).with_name("collecting.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


class Headrace:
    """``headrace serve`` with ``words``, on free ports of 127.0.0.1. Its log is read line by line.

    If ``interactive``, `type` writes to its terminal and `wait_for_prompt` reads from it.
    """

    def __init__(self, *words: str, environ: Mapping[str, str] | None = None, interactive: bool = False) -> None:
        addresses = [
            f"--{name}-{what}" for name in ("http", "grpc", "metrics") for what in ("address=127.0.0.1", "port=0")
        ]
        command = [str(HEADRACE), "serve", *addresses, *words]
        terminal = subprocess.PIPE if interactive else None
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env={**os.environ, **(environ or {})}
        )
        self.lines: list[str] = []
        self.ports: dict[str, int] = {}
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def complaints(self) -> list[str]:
        """The lines in which asyncio or the interpreter complains."""
        return [line for line in self.lines if COMPLAINT.search(line)]

    @property
    def http(self) -> int:
        return self.ports["HTTPService"]

    @property
    def grpc(self) -> int:
        return self.ports["GRPCInferenceService"]

    @property
    def rss_bytes(self) -> int:
        return self._memory("VmRSS")

    @property
    def peak_rss_bytes(self) -> int:
        """The highest `rss_bytes` since `forget_peak`."""
        return self._memory("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def _memory(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found
        return int(found[1]) * 1024

    def wait_for_line(self, pattern: str) -> str:
        """The first line from here on that ``pattern`` finds."""
        while (line := self._next()) is not None:
            if re.search(pattern, line):
                return line
        raise AssertionError(f"the server ended with {self.process.wait()}, no line has {pattern!r}:\n{self.log}")

    def wait_until_listening(self) -> Headrace:
        """Until all ports are known; the models may still be being loaded."""
        while len(self.ports) < 3:
            self.wait_for_line(_LISTENING.pattern)
        return self

    def wait_until_ready(self) -> Headrace:
        self.wait_until_listening()
        wait_until(lambda: self.get("/v2/health/ready")[0] == 200, "the server is ready", LOAD_DEADLINE_S)
        return self

    def get(self, path: str, port: int = 0) -> tuple[int, bytes]:
        """Status and body of a GET over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.http, timeout=DEADLINE_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def metric(self, name: str, model: str, **labels: str) -> float:
        """The sample of ``model`` on the metrics page, summed over versions and other labels."""
        _, page = self.get("/metrics", self.ports["Metrics Service"])
        wanted = [f'{key}="{value}"' for key, value in {"model": model, **labels}.items()]
        samples = re.findall(rf"^{name}{{(.*)}} (\S+)$", page.decode(), re.MULTILINE)
        return sum(float(value) for shown, value in samples if all(each in shown.split(",") for each in wanted))

    def wait_until_metric(self, name: str, model: str, value: float, **labels: str) -> None:
        wait_until(lambda: self.metric(name, model, **labels) == value, f"{name} of {model} is {value}")

    def wait_until_rss(self, limit_bytes: int) -> None:
        """Until no more than ``limit_bytes`` are resident."""
        wait_until(lambda: self.rss_bytes <= limit_bytes, f"at most {limit_bytes >> 20} MiB are resident", 30)

    def wait_until_pending(self, model: str, count: int) -> None:
        """Until ``count`` requests wait in the queue of ``model``."""
        self.wait_until_metric("nv_inference_pending_request_count", model, count)

    def finish(self, number: int = 0) -> int:
        """The exit code, after signal ``number`` if there is one."""
        if number:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        while self._next() is not None:
            pass
        return code

    def stop(self) -> None:
        """Stop by SIGTERM; nothing may have gone wrong in between."""
        code = self.finish(signal.SIGTERM)
        assert code == 0, self.log
        assert "Traceback" not in self.log, self.log

    def wait_for_prompt(self, prompt: str) -> str:
        """Return the terminal output of the server up to ``prompt``."""
        assert self.process.stdout is not None
        seen, output = b"", select.poll()
        output.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        while not seen.endswith(prompt.encode()):
            assert output.poll(DEADLINE_S * 1000), f"no {prompt!r} in {seen!r}:\n{self.log}"
            seen += os.read(self.process.stdout.fileno(), 1)
            assert seen, f"the server ended:\n{self.log}"
        return seen.decode()

    def type(self, line: str) -> None:
        """Enter ``line`` at the server's terminal."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def close(self) -> None:
        """Leave nothing behind. Fails if the log holds a complaint of asyncio or the interpreter."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        assert not self.complaints, f"{self.complaints} in the log of the server:\n{self.log}"

    def _next(self) -> str | None:
        """The next line; None at the end."""
        try:
            line = self._queue.get(timeout=DEADLINE_S)
        except queue.Empty:
            raise AssertionError(f"no further line in {DEADLINE_S} s:\n{self.log}") from None
        if line is not None and (found := _LISTENING.search(line)):
            self.ports[found[1]] = int(found[2])
        return line

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = raw.decode(errors="backslashreplace")
            self.lines.append(line)
            self._queue.put(line)
        self._queue.put(None)


def wait_until(condition: Callable[[], bool], claim: str, deadline_s: float = DEADLINE_S) -> None:
    """Return once ``condition`` holds; fail with ``claim`` if it never does."""
    end, pause = time.monotonic() + deadline_s, threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {claim}"
        pause.wait(0.01)


class _Complaints(logging.Handler):
    """Keeps what asyncio logs as errors in this process."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        # One poller of grpcio's clients serves all loops of a process. It may wake the loop of a test that is over.
        if not ("PollerCompletionQueue._handle_events" in text and "Event loop is closed" in text):
            self.texts.append(text)

    def check(self) -> None:
        """Fail if anything has been logged since the last check."""
        texts, self.texts = self.texts, []
        assert not texts, "asyncio complains:\n" + "\n".join(texts)


@pytest.fixture(scope="session")
def all_complaints() -> Iterator[_Complaints]:
    """Collect the complaints of asyncio. Those that the garbage collector finds late fail the last test."""
    handler, logger = _Complaints(), logging.getLogger("asyncio")
    logger.addHandler(handler)
    yield handler
    gc.collect()
    logger.removeHandler(handler)
    handler.check()


@pytest.fixture(autouse=True)
def asyncio_complaints(all_complaints: _Complaints) -> Iterator[list[str]]:
    """Fails a test during which asyncio logs an error, such as that a pending task was destroyed."""
    yield all_complaints.texts
    all_complaints.check()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace lone surrogates in the logs of tests: pytest's workers send them as UTF-8, which has none."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a module together."""
    from tests.whole_modules import WholeModules

    return WholeModules(config, log) if config.getvalue("dist") == "worksteal" else None


@pytest.fixture(scope="session", name="wait_until")
def _wait_until() -> Callable[..., None]:
    return wait_until


GATE = """
import time
from headrace import Backend, Instance, hookimpl

class Gated(Backend):
    name = "gated"
    def load(self, model):
        (model.path / "seen").touch()
        while (model.path / "loading").exists():
            time.sleep(0.005)
        return Echo(model.path)

class Echo(Instance):
    def __init__(self, path):
        self.path = path
    def execute(self, inputs):
        if (self.path / "fail").exists():
            raise ValueError((self.path / "fail").read_text())
        (self.path / "running").touch()
        while not (self.path / "open").exists():
            time.sleep(0.005)
        return {"OUT": inputs["IN"]}
    def is_ready(self):
        return not (self.path / "sick").exists()

@hookimpl
def register_backends():
    return [Gated]
"""


class Gate:
    """A version directory of a model of the backend ``gated``, which executes while its gate is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def fail(self, reason: str) -> None:
        """Let every execution raise a ValueError with ``reason`` from now on."""
        (self.path / "fail").write_text(reason)

    def wait_until_loading(self) -> None:
        wait_until((self.path / "seen").exists, f"{self.path.parent.name} is being loaded")

    def open(self) -> None:
        (self.path / "open").touch()

    def close(self) -> None:
        (self.path / "running").unlink(missing_ok=True)
        (self.path / "open").unlink()

    def wait_until_running(self) -> None:
        """Until a batch stands at the closed gate."""
        wait_until((self.path / "running").exists, f"{self.path.parent.name} executes")


@pytest.fixture(scope="session")
def make_gate() -> Callable[[Path], Gate]:
    """The gate, open, of the model whose version directory is given."""
    return Gate


@pytest.fixture(scope="session")
def gated_environ(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of processes in which a third party's backend ``gated`` is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "headrace_gated.py").write_text(GATE)
    info = site / "headrace_gated-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-gated\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text("[headrace]\ngated = headrace_gated\n")
    return {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="session")
def gated(gated_environ: Mapping[str, str]) -> Mapping[str, str]:
    """`gated_environ`; the tests of core have a ``gated`` of their own."""
    return gated_environ


@pytest.fixture(scope="session")
def keep_serving() -> Iterator[Callable[..., Headrace]]:
    """Starts servers that live as long as the session, and must end in order."""
    started: list[Headrace] = []

    def start(*words: str, environ: Mapping[str, str] | None = None) -> Headrace:
        started.append(Headrace(*words, environ=environ))
        return started[-1].wait_until_ready()

    with contextlib.ExitStack() as stack:
        yield start
        for server in started:
            stack.callback(server.close)
        for server in started:
            server.stop()


@pytest.fixture
def run_headrace() -> Iterator[Callable[..., Headrace]]:
    """Starts servers that may go wrong; whatever still runs at the end of the test is killed."""
    started: list[Headrace] = []

    def start(*words: str, environ: Mapping[str, str] | None = None, interactive: bool = False) -> Headrace:
        started.append(Headrace(*words, environ=environ, interactive=interactive))
        return started[-1]

    yield start
    with contextlib.ExitStack() as stack:
        for server in started:
            stack.callback(server.close)


@pytest.fixture
def serve(run_headrace: Callable[..., Headrace]) -> Iterator[Callable[..., Headrace]]:
    """Starts servers that must end in order when the test is over, unless it has ended them."""
    started: list[Headrace] = []

    def start(*words: str, environ: Mapping[str, str] | None = None, interactive: bool = False) -> Headrace:
        started.append(run_headrace(*words, environ=environ, interactive=interactive))
        return started[-1].wait_until_ready()

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop()
