"""A backend that acts on its process as a request selects. Imported by servers and by their children.

Input ``x`` f32[rows, n]; output ``y`` is ``x + 1``, output ``n`` i64[rows, 1] is the result of the deed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace.backends.base import (
    AnyInstance,
    Backend,
    Call,
    DeferredInstance,
    Instance,
    Isolation,
    Model,
    RequestInstance,
    StreamInstance,
    Tensors,
)
from headrace.errors import Code, HeadraceError
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace_processes.ipc.codec import Encoder
from headrace_processes.ipc.replies import AnswerStatus, Reply

#: Exceptions that are no `Exception`.
KINDS = (SystemExit, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, BaseException)
#: A process that runs this does not wait for others.
SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


@dataclass(frozen=True, slots=True)
class Parameters:
    instance_kind: str = "requests"
    share: str = ""  #: a deed to do before loading
    load: str = ""  #: a deed to do while loading
    warm_up: str = ""  #: a deed to do while warming up
    always: str = ""  #: the deed for requests that name none
    close: str = ""  #: a deed to do while closing
    unshare: str = ""  #: a deed to do when the shared object is released
    folder: str = ""  #: where files of this model's deeds are
    load_timeout_s: float = 30.0


class Trial(Backend):
    name: ClassVar[str] = "trial"
    Parameters: ClassVar[type] = Parameters

    def isolation(self, model: Model) -> Isolation | None:
        parameters: Parameters = model.parameters
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        return Isolation(
            environ={"PYTHONPATH": path},
            start_timeout_s=0.0 if parameters.load_timeout_s < 10 else 30.0,
            load_timeout_s=parameters.load_timeout_s,
        )

    def share(self, model: Model) -> Any:
        parameters: Parameters = model.parameters
        if parameters.share:
            do(parameters.share, parameters.folder, None)
        _note(parameters, "shared")
        return parameters

    def unshare(self, shared: Any) -> None:
        _note(shared, "unshared")
        if shared.unshare:
            do(shared.unshare, shared.folder, None)

    def load(self, model: Model) -> AnyInstance:
        parameters: Parameters = model.parameters
        instance_kinds: dict[str, Callable[[Parameters], AnyInstance]] = {
            "rows": Rows,
            "requests": Requests,
            "stream": Stream,
            "deferred": Deferred,
            "asker": partial(Asker, model.services),
            **STRAYS,
        }
        if parameters.load:
            do(parameters.load, parameters.folder, None)
        (Path(parameters.folder) / "is_sent").write_text(str(model.is_sent))
        return instance_kinds[parameters.instance_kind](parameters)


def _note(parameters: Parameters, what: str) -> None:
    """Add a line to the life of the model."""
    with (Path(parameters.folder) / "life").open("a") as file:
        file.write(f"{what}\n")


class _Living:
    """The deeds of an instance before its first request and after its last."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def warm_up(self) -> None:
        if self.parameters.warm_up:
            do(self.parameters.warm_up, self.parameters.folder, None)

    def close(self) -> None:
        _note(self.parameters, "closed")
        if self.parameters.close:
            do(self.parameters.close, self.parameters.folder, None)


class Rows(_Living, Instance):
    def execute(self, inputs: Tensors) -> Tensors:
        x: Any = inputs["x"]
        if np.isnan(x).any():
            raise HeadraceError("a row is not a number", Code.INVALID_ARGUMENT)
        return {"y": x + np.float32(1), "n": np.full((len(x), 1), len(x), np.int64)}


class Requests(_Living, RequestInstance):
    def execute_requests(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | HeadraceError]:
        always, folder = self.parameters.always, self.parameters.folder
        return [answer(request, folder, len(requests), always) for request in requests]


class Stream(_Living, StreamInstance):
    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        for index in range(int(request.parameters.get("count", 3))):
            (Path(self.parameters.folder) / "sent").write_text(str(index + 1))
            yield response(request, index)


class Asker(_Living, RequestInstance):
    """Answers by a call to the model ``callee``."""

    def __init__(self, services: Any, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.services = services

    def execute_requests(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | HeadraceError]:
        answers = []
        for request in requests:
            for _ in range(int(request.parameters.get("interrupted", 0))):
                self._interrupt(request)
            nested = InferRequest("callee", request.inputs, callers=("m",), caller=request)
            before = _looks
            answers.append(self.services.ask(nested))
            (Path(self.parameters.folder) / "answered").write_text(str(_looks - before))
        return answers

    def _interrupt(self, request: InferRequest) -> None:
        """Call a model, and stop waiting when an alarm is raised."""
        kind: type[Exception] = TimeoutError if request.parameters.get("as_timeout") else KeyError

        def ring(number: int, frame: Any) -> None:
            raise kind("the time is over")

        signal.signal(signal.SIGALRM, ring)
        inputs = {"x": request.inputs["x"] - np.float32(100)}
        nested = InferRequest("callee", inputs, callers=("m",), caller=request)
        signal.setitimer(signal.ITIMER_REAL, 0.03)
        with contextlib.suppress(kind):
            self.services.ask(nested)
        signal.setitimer(signal.ITIMER_REAL, 0)


class Deferred(_Living, DeferredInstance):
    def accept(self, calls: Sequence[Call]) -> None:
        for call in calls:
            threading.Thread(target=self._answer, args=(call, len(calls)), daemon=True).start()

    def _answer(self, call: Call, count: int) -> None:
        call.send(answer(call.request, self.parameters.folder, count))


# ---------------------------------------------------------------------- exceptions that are no Exception

_stray = iter(KINDS)


def stray() -> None:
    """Raise the next of `KINDS`."""
    raise next(_stray)("stray")


class StrayRows(_Living, Instance):
    def execute(self, inputs: Tensors) -> Tensors:
        stray()
        return inputs


class StrayRequests(_Living, RequestInstance):
    def execute_requests(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | HeadraceError]:
        stray()
        return ()


class StrayStream(_Living, StreamInstance):
    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        stray()
        return iter(())


class StrayIterator(_Living, StreamInstance):
    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        yield response(request, 0)
        stray()


class StrayAccept(_Living, DeferredInstance):
    def accept(self, calls: Sequence[Call]) -> None:
        stray()


STRAYS: dict[str, Callable[[Parameters], AnyInstance]] = {
    "stray rows": StrayRows,
    "stray requests": StrayRequests,
    "stray stream": StrayStream,
    "stray iterator": StrayIterator,
    "stray accept": StrayAccept,
}


def answer(request: InferRequest, folder: str, count: int, always: str = "") -> InferResponse | HeadraceError:
    deed = str(request.parameters.get("do", always))
    try:
        return response(request, do(deed, folder, request) if deed else count)
    except HeadraceError as error:
        return error


def response(request: InferRequest, value: int) -> InferResponse:
    x: Any = request.inputs["x"]
    return InferResponse({"y": x + np.float32(1), "n": np.full((len(x), 1), value, np.int64)})


# ---------------------------------------------------------------------- deeds


def do(deed: str, folder: str, request: InferRequest | None) -> int:
    """Do ``deed``; returns its number, 0 if it has none."""
    result = DEEDS[deed](Path(folder), request)
    return int(result) if result is not None else 0


def _raise(folder: Path, request: Any) -> None:
    raise ValueError("raised on purpose")


def _refuse(folder: Path, request: Any) -> None:
    raise HeadraceError("no such thing", Code.NOT_FOUND)


def _exit(folder: Path, request: Any) -> None:
    os._exit(3)


def _leave(folder: Path, request: Any) -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()  # and not a daemon
    sys.exit(3)


def _quit(folder: Path, request: Any) -> None:
    sys.exit(3)


def _segfault(folder: Path, request: Any) -> None:
    ctypes.string_at(0)


def _kill(folder: Path, request: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _eat(folder: Path, request: Any) -> None:
    arrays = []
    while True:
        arrays.append(np.ones(1 << 24, np.uint8))


def _touch(folder: Path, request: Any) -> None:
    (folder / "touched").touch()


def _gate(folder: Path, request: Any) -> None:
    (folder / "running").touch()
    while not (folder / "open").exists():
        time.sleep(0.005)


def _sleep(folder: Path, request: Any) -> None:
    (folder / "running").touch()
    time.sleep(1000)


def _stop(folder: Path, request: Any) -> None:
    (folder / "running").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def _until_cancelled(folder: Path, request: Any) -> None:
    (folder / "running").touch()
    while not request.cancelled:
        time.sleep(0.005)
    (folder / "cancelled").touch()


def _ignore_term(folder: Path, request: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _start(folder: Path, request: Any) -> int:
    return subprocess.Popen(SLEEP).pid


def _start_carelessly(folder: Path, request: Any) -> int:
    """A process that inherits everything."""
    return subprocess.Popen(SLEEP, close_fds=False).pid


def _fork(folder: Path, request: Any) -> int:
    """A process that has every descriptor of this one."""
    pid = os.fork()
    if not pid:
        time.sleep(1000)
    return pid


def _fork_away(folder: Path, request: Any) -> int:
    """The same, outside of the process group."""
    pid = os.fork()
    if not pid:
        os.setsid()
        time.sleep(1000)
    return pid


def _fork_back(folder: Path, request: Any) -> int:
    """Two processes that return from this batch."""
    return os.fork()


def _descriptors() -> dict[int, str]:
    """Return the target of each open descriptor of this process."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found[int(link.name)] = str(link.readlink())
    return dict(sorted(found.items()))


def _sockets() -> list[int]:
    return [fd for fd, target in _descriptors().items() if target.startswith("socket:")]


def _lie(folder: Path, request: Any) -> None:
    """Report that this request has run, and one that was never sent."""
    replies = [Reply(call, AnswerStatus.NOTHING, True, None) for call in (request.call, 2**40)]
    os.write(_sockets()[0], Encoder(None).answers(replies, (1, 2, 3, 4)))
    time.sleep(1000)


def _memories() -> list[int]:
    return [fd for fd, target in _descriptors().items() if target.startswith("/memfd:")]


def _hang_up(folder: Path, request: Any) -> None:
    """Close both lines, and live on."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in _sockets():
        os.dup2(null, fd)
    time.sleep(1000)


def _hang_up_aside(folder: Path, request: Any) -> None:
    import socket

    for fd in _sockets()[1:]:
        socket.socket(fileno=os.dup(fd)).shutdown(socket.SHUT_RDWR)


def _babble(folder: Path, request: Any) -> None:
    for fd in _sockets():
        os.write(fd, os.urandom(4096))
    time.sleep(1000)


def _shrink(folder: Path, request: Any) -> int:
    """Return the number of arenas that could be made smaller."""
    done = 0
    for fd in _memories():
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            done += 1
    return done * 100 + len(_memories())


def _scribble(folder: Path, request: Any) -> None:
    """Write over the beginning of both arenas, for as long as this process lives."""

    def scribble(fds: list[int]) -> None:
        while True:
            for fd in fds:
                os.pwrite(fd, os.urandom(1 << 16), 0)
            time.sleep(0.001)

    threading.Thread(target=scribble, args=(_memories(),), daemon=True).start()


_looks = 0


def _count_looks(folder: Path, request: Any) -> None:
    """From now on, count the polls of this process for a message before it sleeps."""
    give_way = os.sched_yield

    def counted() -> None:
        global _looks
        _looks += 1
        give_way()

    os.sched_yield = counted


class _Circle:
    """An object in a reference cycle: only the collector frees it."""

    alive = 0

    def __init__(self) -> None:
        _Circle.alive += 1
        self.itself = self

    def __del__(self) -> None:
        _Circle.alive -= 1


def _leave_circles(folder: Path, request: Any) -> None:
    for _ in range(3):
        _Circle()


def _collect(folder: Path, request: Any) -> int:
    """Return the number of cycles after a collection; -1 if automatic collection is off."""
    gc.collect()
    return _Circle.alive if gc.isenabled() else -1


DEEDS: dict[str, Callable[[Path, Any], int | None]] = {
    "babble": _babble,
    "circles": lambda folder, request: _Circle.alive,
    "collect": _collect,
    "count looks": _count_looks,
    "eat": _eat,
    "exit": _exit,
    "fork": _fork,
    "fork away": _fork_away,
    "fork back": _fork_back,
    "gate": _gate,
    "hang up": _hang_up,
    "hang up aside": _hang_up_aside,
    "ignore term": _ignore_term,
    "kill": _kill,
    "leave": _leave,
    "lie": _lie,
    "frozen": lambda folder, request: gc.get_freeze_count(),
    "leave circles": _leave_circles,
    "looks": lambda folder, request: _looks,
    "pid": lambda folder, request: os.getpid(),
    "priority": lambda folder, request: request.priority,
    "quit": _quit,
    "raise": _raise,
    "refuse": _refuse,
    "scribble": _scribble,
    "segfault": _segfault,
    "shrink": _shrink,
    "sleep": _sleep,
    "start": _start,
    "start carelessly": _start_carelessly,
    "stop": _stop,
    "touch": _touch,
    "until cancelled": _until_cancelled,
    "version": lambda folder, request: int(request.model_version),
}
