"""How requests get in: one place for every protocol, for models that ask models, and for the program itself.

::

    find    the model, by name and version; a decoupled one only where any number of responses is taken
    start   its check, and its scheduler
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from headrace.errors import HeadraceError, InvalidArgument, Unsupported
from headrace.messages.request import InferRequest
from headrace.models.view import ModelView

#: Finds a model by name and version (empty: the latest). Raises `HeadraceError`.
Resolve: TypeAlias = Callable[[str, str], ModelView]


class Entrance:
    """One way in. Event loop only.

    ``single`` words the refusal of a decoupled model by its name, where the caller takes one response;
    None lets it pass.
    """

    __slots__ = ("_resolve", "_single", "find", "start")

    def __init__(self, resolve: Resolve, single: Callable[[str], HeadraceError] | None = None) -> None:
        self._resolve, self._single = resolve, single
        #: The model for a name and a version. Raises `HeadraceError` if there is none, or this is no way to ask it.
        self.find: Resolve = resolve if single is None else self._find_single
        #: Has a request that was made for a view checked and answered. Raises `InvalidArgument` or `Unavailable`
        #: if it is refused; then it is not answered.
        self.start = start

    def submit(self, request: InferRequest) -> ModelView:
        """`find` and `start`: for a request that was long in the making, so that another version may serve by now."""
        view = self.find(request.model_name, request.model_version)
        self.start(view, request)
        return view

    def _find_single(self, name: str, version: str) -> ModelView:
        view = self._resolve(name, version)
        if view.decoupled and self._single is not None:
            raise self._single(name)
        return view


def start(view: ModelView, request: InferRequest) -> None:
    """Check ``request`` and hand it to the scheduler, which answers it."""
    view.check(request)
    view.enqueue(request)


# ---------------------------------------------------------------------------
# How a decoupled model is refused to those who take one response
# ---------------------------------------------------------------------------


def not_over_http(name: str) -> HeadraceError:
    return Unsupported("HTTP end point doesn't support models with decoupled transaction policy")


def not_by_model_infer(name: str) -> HeadraceError:
    return Unsupported("ModelInfer RPC doesn't support models with decoupled transaction policy")


def not_by_models(name: str) -> HeadraceError:
    return InvalidArgument(
        f"Model {name} is using the decoupled. The current BLS request call doesn't support models using the "
        "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' "
        "calls for decoupled models.'"
    )


def not_by_infer(name: str) -> HeadraceError:
    return Unsupported(f"model '{name}' is decoupled: it may give any number of responses")
