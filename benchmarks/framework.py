"""The interface of an engine for the benchmarks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from networks import SHAPES, SMALL, Array

Call = Callable[[Array], Array]
MAX_BATCH = 64


class Framework(ABC):
    """An engine.

    - ``name``: the suffix of its models' names. ``backend``: the backend in its configs. ``package``: its import name.
    - ``threads_key``: the parameter of a config for threads within an operator.
    - ``networks``: the networks to measure.
    - ``config``: further fields of its configs. ``kind``: the kind of its instances.
    """

    name: ClassVar[str]
    backend: ClassVar[str]
    package: ClassVar[str]
    threads_key: ClassVar[str]
    networks: ClassVar[tuple[str, ...]] = SMALL
    config: ClassVar[str] = ""
    kind: ClassVar[str] = "KIND_CPU"

    @abstractmethod
    def write(self, network: str, version: Path) -> None:
        """Write the file of ``network`` to the directory ``version``."""

    @abstractmethod
    def open(self, version: Path, threads: int) -> Call:
        """Return a function that computes FP32 rows with ``threads`` threads, by the engine's fastest API."""

    def threads_of(self, instances: int, threads: int) -> Mapping[str, str]:
        """Return the parameters with which each of ``instances`` computes on ``threads`` threads."""
        return {self.threads_key: str(threads)}

    def config_of(self, network: str, instances: int = 1, parameters: Mapping[str, str] | None = None) -> str:
        """Return the text of a config.pbtxt."""
        dims = ", ".join(map(str, SHAPES[network]))
        settings = "".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
            for key, value in (parameters or {}).items()
        )
        return (
            f'backend: "{self.backend}"\n{self.config}max_batch_size: {MAX_BATCH}\ndynamic_batching {{ }}\n'
            f"instance_group {{ kind: {self.kind} count: {instances} }}\n{settings}"
            f'input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ {dims} ] }}\n'
            'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 10 ] }\n'
        )
