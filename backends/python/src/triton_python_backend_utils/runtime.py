"""The runtime of a model's code: its model, and the server's services for it.

Code of a model reaches the server through global objects (``pb_utils.Logger``), so the runtime is found by the calling
code. In this order:

1. the runtime that the code was entered with (`Runtime.entered`), which asyncio tasks inherit;
2. the only model of this interpreter (`use`): the process of an instance has one;
3. the nearest function on the stack whose module belongs to a model. The importer of a model's modules puts the runtime
   into their globals under `MODULE_KEY`, so that threads of a model find it, too.

Without a runtime there is no server, as in a unit test of a model.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar, Token
from dataclasses import dataclass
from enum import Enum
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace import InferRequest, Services

MODULE_KEY = "__headrace_runtime__"


class ModelPhase(Enum):
    """The phase of a model's life, set by its instance. It decides which services the model may use."""

    COMPLETING = "auto_complete_config"
    INITIALIZING = "initialize"
    SERVING = "execute"
    FINALIZING = "finalize"


@dataclass(slots=True, eq=False)
class Runtime:
    """One instance of a Python model for pb_utils. Only ``phase`` changes.

    ``model_dir`` is the directory of its version.
    """

    model_name: str
    model_version: str = "1"
    decoupled: bool = False
    services: Services | None = None
    phase: ModelPhase = ModelPhase.INITIALIZING
    model_dir: str = ""

    def entered(self, callers: tuple[str, ...] = (), caller: InferRequest | None = None) -> Entered:
        """Return a context manager for a call of the model's code, on the calling thread.

        ``callers`` are the models that wait for any request of the batch (`InferRequest.callers`), and ``caller`` is
        one of these requests.
        """
        return Entered(self, callers, caller)


class Entered:
    """`Runtime.entered`."""

    __slots__ = ("_token", "caller", "callers", "runtime")

    def __init__(self, runtime: Runtime, callers: tuple[str, ...], caller: InferRequest | None) -> None:
        self.runtime = runtime
        self.callers = callers
        self.caller = caller
        self._token: Token[Entered | None] | None = None

    def __enter__(self) -> Runtime:
        self._token = _ENTERED.set(self)
        return self.runtime

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _ENTERED.reset(self._token)


_ENTERED: ContextVar[Entered | None] = ContextVar("headrace_runtime", default=None)
_only: list[Runtime] = []


def use(runtime: Runtime | None) -> None:
    """Make ``runtime`` the only one of this interpreter; None removes it."""
    _only[:] = [] if runtime is None else [runtime]


def current() -> Runtime | None:
    """Return the runtime of the code that calls; None without a server."""
    entered = _ENTERED.get()
    if entered is not None:
        return entered.runtime
    return _only[0] if _only else _on_stack()


def callers() -> tuple[str, ...]:
    """Return the models that wait for the request of the calling code, outermost first."""
    entered = _ENTERED.get()
    return () if entered is None else entered.callers


def caller() -> InferRequest | None:
    """Return the request that the calling code executes, or one of its batch; None if it is unknown."""
    entered = _ENTERED.get()
    return None if entered is None else entered.caller


def _on_stack() -> Runtime | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_globals.get(MODULE_KEY)
        if isinstance(found, Runtime):
            return found
        frame = frame.f_back
    return None
