"""The code of a model finds its runtime."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import types
from collections.abc import Iterator

import pytest

import triton_python_backend_utils as pb_utils
from triton_python_backend_utils import runtime as runtimes
from triton_python_backend_utils.runtime import MODULE_KEY, Runtime

ONE, OTHER = Runtime("one"), Runtime("other")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    runtimes.use(None)


def module_of(runtime: Runtime) -> types.ModuleType:
    """A module as its loader creates it, with a function that gets the runtime, and one that calls back."""
    module = types.ModuleType(f"model of {runtime.model_name}")
    module.__dict__[MODULE_KEY] = runtime
    for function in (_ask, _pass):
        module.__dict__[function.__name__] = types.FunctionType(function.__code__, module.__dict__)
    module.__dict__["runtimes"] = runtimes
    return module


def _ask() -> Runtime | None:
    return runtimes.current()


def _pass(ask):  # type: ignore[no-untyped-def]  # is run as a model's function
    return ask()


def test_code_outside_a_model_has_no_services() -> None:
    assert runtimes.current() is None
    assert runtimes.callers() == ()


def test_entered_code_and_its_tasks_find_their_runtime() -> None:
    async def ask_twice() -> list[Runtime | None]:
        return [runtimes.current(), await asyncio.create_task(ask())]

    async def ask() -> Runtime | None:
        return runtimes.current()

    with ONE.entered(("outer",)):
        with OTHER.entered():
            assert (runtimes.current(), runtimes.callers()) == (OTHER, ())
        assert (runtimes.current(), runtimes.callers()) == (ONE, ("outer",))
        assert asyncio.run(ask_twice()) == [ONE, ONE]
    assert runtimes.current() is None


def test_an_exception_exits_the_runtime() -> None:
    with pytest.raises(ZeroDivisionError), ONE.entered():
        raise ZeroDivisionError
    assert runtimes.current() is None


def test_only_model_of_an_interpreter_needs_no_entering() -> None:
    runtimes.use(ONE)
    found: list[Runtime | None] = []
    thread = threading.Thread(target=lambda: found.append(runtimes.current()))
    thread.start()
    thread.join(20)
    assert found == [ONE]


def test_thread_of_a_model_finds_it_by_its_module() -> None:
    one, other = module_of(ONE), module_of(OTHER)
    found: list[Runtime | None] = []
    for target in (one._ask, other._ask, lambda: other._pass(runtimes.current), lambda: one._pass(other._ask)):
        thread = threading.Thread(target=lambda target=target: found.append(target()))
        thread.start()
        thread.join(20)
    assert found == [ONE, OTHER, OTHER, OTHER]


def test_the_entered_runtime_takes_precedence_over_the_modules() -> None:
    other = module_of(OTHER)

    def ask() -> object:
        with ONE.entered():
            return other._ask()

    assert contextvars.Context().run(ask) is ONE


def test_the_directory_of_a_model_is_that_of_its_version() -> None:
    with Runtime("m", model_dir="/models/m/1").entered():
        assert pb_utils.get_model_dir() == "/models/m/1"
    with pytest.raises(pb_utils.TritonModelException, match="no model"):
        pb_utils.get_model_dir()
