"""Measure the time to wake a process on this machine: ``python benchmarks/wake_up.py``.

Two processes send each other a byte repeatedly, and sleep until it arrives: on cores that the system chooses, on two
fixed cores, and on one. Half of a round trip is a wake-up. If it takes more than about 15 µs,
try ``busy_poll_microseconds`` (docs/isolation.md).
"""

from __future__ import annotations

import argparse
import os
import socket
import time


def round_trips_us(cores: tuple[int, int] | None, count: int) -> tuple[list[float], float]:
    """Return the sorted times of the round trips, and the CPU of one process per round trip."""
    allowed = os.sched_getaffinity(0)
    ours, its = socket.socketpair()
    child = os.fork()
    if not child:
        if cores:
            os.sched_setaffinity(0, cores[1:])
        ours.close()
        while its.recv(1):
            its.send(b"x")
        os._exit(0)
    its.close()
    if cores:
        os.sched_setaffinity(0, cores[:1])
    took: list[float] = []
    before = time.process_time()
    with ours:
        for _ in range(count):
            began = time.perf_counter_ns()
            ours.send(b"x")
            ours.recv(1)
            took.append((time.perf_counter_ns() - began) / 1000)
        cpu_us = (time.process_time() - before) / count * 1e6
    os.waitpid(child, 0)
    os.sched_setaffinity(0, allowed)
    return sorted(took), cpu_us


def wake_up_us(count: int = 2000) -> float:
    """Return the median wake-up, on cores that the system chooses."""
    took, _ = round_trips_us(None, count)
    return took[len(took) // 2] / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    count = parser.parse_args().count
    first, *others = sorted(os.sched_getaffinity(0))
    places = {"free": None, "one core": (first, first)} | ({"two cores": (first, others[0])} if others else {})
    for name, cores in places.items():
        took, cpu_us = round_trips_us(cores, count)
        half = {f"p{share}": took[count * share // 100] / 2 for share in (10, 50, 90)}
        quantiles = ", ".join(f"{quantile} {value:5.1f}" for quantile, value in half.items())
        print(f"{name:10} a wake-up takes {quantiles} µs; CPU of one side {cpu_us:5.1f} µs a round trip")


if __name__ == "__main__":
    main()
