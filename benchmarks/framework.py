"""What an engine must say of itself to be measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from networks import SHAPES, SMALL, Array

Call = Callable[[Array], Array]
MAX_BATCH = 64


class Framework(ABC):
    """``name`` is what its models are called by, ``backend`` who serves them, ``threads_key`` the parameter of a config
    for threads within an operator, ``package`` what is imported. ``networks`` are those that it is measured with, and
    ``config`` is what its configs say besides. ``kind`` is that of its instances, as a config names it."""

    name: ClassVar[str]
    backend: ClassVar[str]
    package: ClassVar[str]
    threads_key: ClassVar[str]
    networks: ClassVar[tuple[str, ...]] = SMALL
    config: ClassVar[str] = ""
    kind: ClassVar[str] = "KIND_CPU"

    @abstractmethod
    def write(self, network: str, version: Path) -> None:
        """The file of ``network`` into the directory ``version``."""

    @abstractmethod
    def open(self, version: Path, threads: int) -> Call:
        """What computes FP32 rows, with ``threads`` threads, in the quickest way that its API has."""

    def threads_of(self, instances: int, threads: int) -> Mapping[str, str]:
        """The parameters with which each of ``instances`` computes on ``threads`` threads."""
        return {self.threads_key: str(threads)}

    def config_of(self, network: str, instances: int = 1, parameters: Mapping[str, str] | None = None) -> str:
        """The text of a config.pbtxt."""
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
