from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace import Backend, Instance, Model, Shared


class Engine:
    """Something that is made once."""


def test_one_object_is_created_per_key_for_simultaneous_calls() -> None:
    shared, made, together = Shared[str, Engine](), list[Engine](), threading.Barrier(8)

    def make() -> Engine:
        made.append(Engine())
        return made[-1]

    def ask(key: str) -> Engine:
        together.wait()
        return shared.get(key, make)

    with ThreadPoolExecutor(8) as threads:
        objects = list(threads.map(ask, ["cpu", "gpu"] * 4))
    assert len(made) == 2
    assert objects == [objects[0], objects[1]] * 4


def test_shared_object_is_created_again_after_a_failure() -> None:
    shared = Shared[str, Engine]()

    def fail() -> Engine:
        raise OSError("no file")

    with pytest.raises(OSError, match="no file"):
        shared.get("cpu", fail)
    engine = Engine()
    assert shared.get("cpu", lambda: engine) is engine


def test_shared_object_is_freed_when_the_last_instance_has_closed() -> None:
    class Sharing(Backend):
        name = "sharing"

        def load(self, model: Model) -> Instance:
            raise NotImplementedError

    shared = Shared[str, Engine]()
    engine = weakref.ref(shared.get("cpu", Engine))
    Sharing({}).unshare(shared)
    gc.collect()
    assert engine() is None
