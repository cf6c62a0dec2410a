"""The number of threads of an engine, so that the instances of a model share the cores."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from headrace import available_cores

if TYPE_CHECKING:
    from headrace import ModelConfig

_setting = threading.Lock()


def threads_per_instance(config: ModelConfig, default_instances: int) -> int:
    """Return how many threads an operator may use: the cores divided among the CPU instances of ``config``.

    ``default_instances`` is the count of a CPU group without a count (``Backend.cpu_instances``).
    """
    from headrace import ModelInstanceGroup  # a process of a model may have no protobuf

    cpu_kinds = (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_AUTO)
    instances = sum(
        group.count or default_instances
        for group in config.instance_group
        if group.kind in cpu_kinds and not group.passive
    )
    return max(1, available_cores() // max(1, instances or default_instances))


def threads_beside_server(config: ModelConfig, default_instances: int) -> int:
    """Return `threads_per_instance`, or one less if that is all of several cores.

    The server needs a core, too: an operator waits for its slowest thread, which would be the one without a core.
    """
    cores, share = available_cores(), threads_per_instance(config, default_instances)
    return max(1, cores - 1) if share == cores else share


def set_torch_threads(torch: Any, count: int) -> None:
    """Set the threads within an operator of the module ``torch`` for the calling thread only.

    PyTorch has a number for each thread that has computed, and a default for threads that have not. ``set_num_threads``
    sets both, and the first computation of a thread replaces its number by the default.
    """
    with _setting, ThreadPoolExecutor(1) as new_thread:
        others = new_thread.submit(torch.get_num_threads).result()
        torch.get_num_threads()  # from now on this thread has a number
        torch.set_num_threads(count)
        new_thread.submit(torch.set_num_threads, others).result()
