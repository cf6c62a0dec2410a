"""When the collector runs in a process that serves; each time in a process of its own, whose collector it is alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: A process whose clocks, memory and timers are set by the test.
STAGE = """
import gc, weakref
from math import inf
from headrace_cli import garbage_collection
from headrace_cli.garbage_collection import GROWTH_BYTES, LONG_S, MOST, PATIENCE_S, TICK_S, CollectionPolicy

garbage_collection.release_left_heaps = lambda: None  # its threads would be frozen, and end later

class Timer:
    def cancel(self): self.is_cancelled = True

class Stage:
    now = used = 0.0
    resident = 1 << 30
    def clock(self): return self.now
    def used_s(self): return self.used
    def resident_bytes(self): return self.resident
    def call_later(self, delay_s, call): return Timer()
    def tick(self, used_s):
        self.now += TICK_S
        self.used += used_s
        policy.tick()

class Cycle:
    def __init__(self): self.itself = self

BUSY = TICK_S
USUAL = gc.get_threshold()[0]
stage = Stage()
policy = CollectionPolicy(stage, stage.resident_bytes, stage.clock, stage.used_s)

def frozen_garbage():
    cycle = Cycle()
    gc.freeze()
    return weakref.ref(cycle)

def live(count):
    return [[] for _ in range(count)]

def threshold():
    return gc.get_threshold()[0]

"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", STAGE + code], capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_collections_of_nothing_become_rarer_and_are_as_frequent_as_ever_once_they_find_something() -> None:
    run("""
policy.start()
assert threshold() == USUAL
kept = live(10 * USUAL)
assert 2 * USUAL <= threshold() < 10 * USUAL
kept += live(10 * MOST)
assert threshold() == MOST
kept += [Cycle() for _ in range(2 * MOST)]
assert threshold() == MOST
for _ in range(2 * MOST): Cycle()
assert threshold() == USUAL
""")


def test_seldom_collections_stay_as_they_are() -> None:
    run("""
class Slow(Stage):
    def clock(self):
        self.now += 1
        return self.now
stage = Slow()
policy = CollectionPolicy(stage, stage.resident_bytes, stage.clock, stage.used_s)
policy.start()
kept = live(100 * USUAL)
assert threshold() == USUAL
""")


@pytest.mark.parametrize(
    "before",
    ["stage.resident = 0", "gc.set_threshold(0)"],
    ids=["memory that is not known", "no collections"],
)
def test_thresholds_are_left_alone_where_they_are_not_ours_to_raise(before: str) -> None:
    run(f"""
{before}
policy = CollectionPolicy(stage, stage.resident_bytes, stage.clock, stage.used_s)
policy.start()
found = gc.get_threshold()
kept = live(100 * USUAL)
policy.close()
assert gc.get_threshold() == found
""")


def test_a_threshold_that_a_model_sets_later_stays() -> None:
    run("""
policy.start()
kept = live(10 * USUAL)
gc.set_threshold(3000, 20, 30)
kept += live(100 * USUAL)
policy.close()
assert gc.get_threshold() == (3000, 20, 30)
""")


def test_garbage_of_an_unloaded_model_is_collected_when_the_process_is_idle() -> None:
    run("""
policy.start()
left = frozen_garbage()
policy.model_unloaded(None)
stage.tick(BUSY)
assert left() is not None
stage.tick(0)
assert left() is None
kept = gc.get_freeze_count()
stage.tick(0)
assert gc.get_freeze_count() == kept
""")


def test_garbage_of_an_unloaded_model_is_collected_in_time_if_the_process_is_never_idle() -> None:
    run("""
policy.start()
left = frozen_garbage()
policy.model_unloaded(None)
for _ in range(int(PATIENCE_S / TICK_S) - 1):
    stage.tick(BUSY)
assert left() is not None
policy.model_loaded(None)  # the collection may wait, and delays no request
stage.tick(BUSY)
assert left() is None
""")


def test_objects_of_a_load_are_frozen_at_once_and_collected_when_the_process_is_idle() -> None:
    run("""
policy.start()
before = gc.get_freeze_count()
engine, left = live(5000), weakref.ref(Cycle())
assert left() is not None
policy.model_loaded(None)
assert gc.get_freeze_count() >= before + 5000
for _ in range(10 * int(PATIENCE_S / TICK_S)):
    stage.tick(BUSY)
assert left() is not None
stage.tick(0)
assert left() is None
assert gc.get_freeze_count() >= before + 5000
""")


def test_growing_memory_starts_a_collection_of_frozen_objects_too() -> None:
    run("""
policy.start()
left, young = frozen_garbage(), weakref.ref(Cycle())
stage.resident += GROWTH_BYTES
stage.tick(BUSY)
assert left() is not None and young() is not None
stage.resident += GROWTH_BYTES
stage.tick(BUSY)
assert left() is None and young() is None
left = frozen_garbage()
stage.tick(BUSY)  # so much is usual now
assert left() is not None
""")


def test_memory_that_requests_hold_is_no_reason_to_look() -> None:
    run("""
held = 0
policy = CollectionPolicy(stage, stage.resident_bytes, stage.clock, stage.used_s, lambda: held)
policy.start()
left, young = frozen_garbage(), weakref.ref(Cycle())
for _ in range(4):
    held += GROWTH_BYTES
    stage.resident += GROWTH_BYTES
    stage.tick(BUSY)
assert left() is not None and young() is not None
held = 8 << 30  # announced, and not all of it is there
stage.tick(BUSY)
assert left() is not None and young() is not None
held = 0  # what stays now is held by something else
stage.tick(BUSY)
assert left() is None and young() is None
held = stage.resident  # the next limit is one without what requests hold
policy.collect_all()
left = frozen_garbage()
held = 0
stage.tick(BUSY)
assert left() is None
""")


def test_memory_of_young_garbage_starts_no_collection_of_frozen_objects() -> None:
    run("""
policy.start()
left = frozen_garbage()
class Holds(Cycle):
    def __del__(self): stage.resident -= 2 * GROWTH_BYTES
Holds()
stage.resident += 2 * GROWTH_BYTES
stage.tick(BUSY)
assert left() is not None
assert stage.resident == 1 << 30
""")


def test_a_long_collection_freezes_the_objects_that_survive_it() -> None:
    run("""
class Slow(Stage):
    def clock(self):
        self.now += LONG_S * 1.01
        return self.now
stage = Slow()
policy = CollectionPolicy(stage, stage.resident_bytes, stage.clock, stage.used_s)
policy.start()
before, kept = gc.get_freeze_count(), live(5000)
gc.collect(1)
assert gc.get_freeze_count() == before
gc.collect()
assert gc.get_freeze_count() >= before + 5000
left = frozen_garbage()
stage.tick(0)
assert left() is not None  # objects that were just released may still be in use
looks = []
gc.callbacks.append(lambda phase, info: looks.append(phase))
stage.tick(0)
assert left() is None
for _ in range(10): stage.tick(0)
assert looks == ["start", "stop"]
""")


def test_a_server_in_a_program_does_not_change_the_collector(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(
        'backend: "identity" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [1] }'
        'output { name: "y" data_type: TYPE_FP32 dims: [1] }'
    )
    run(f"""
import headrace, numpy
def settings():
    return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), list(gc.callbacks), gc.get_debug()
before = settings()
with headrace.Server({str(tmp_path)!r}) as server:
    server.infer("m", {{"x": numpy.ones((1, 1), numpy.float32)}})
    assert settings() == before
assert settings() == before
""")


def test_while_models_are_loaded_first_collections_are_rare() -> None:
    run("""
policy.rest()
assert threshold() == MOST
policy.start()
assert threshold() == USUAL
""")


def test_the_interpreter_waits_for_the_release_of_heaps() -> None:
    """The release starts threads. In CPython 3.11, one that begins while the interpreter exits may crash it."""
    printed = run("""
import threading
def release():
    threading.main_thread().join()  # the program has ended
    print("released")
garbage_collection.release_left_heaps = release
policy.start()
""")
    assert printed == "released\n"
