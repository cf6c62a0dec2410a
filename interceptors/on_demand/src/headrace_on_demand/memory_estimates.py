"""Estimates of the memory of a model until it is loaded and measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace import LoadableModel, LoadError
from headrace_on_demand.memory_budget import HOST, MemoryBudget
from headrace_on_demand.model_state import ModelState

#: The memory of a model process besides its files, until one is measured: an interpreter and NumPy.
_PROCESS_BYTES = 48 << 20
#: The peak of a load over the size of the file: file, parsed form and weights. ONNX Runtime needs 3.3.
_LOADING = 3.5


class MemoryEstimates:
    """Estimates for models that are about to be loaded within ``budget``."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        #: By backend, the most memory of a model in processes besides its files.
        self._overhead: dict[str, int] = {}

    def record(self, state: ModelState) -> None:
        """Record the memory of ``state``, which is loaded in processes, besides its files."""
        overhead = state.process_bytes - state.file_bytes
        self._overhead[state.backend] = max(self._overhead.get(state.backend, 0), overhead)

    def unmeasured(self, models: Iterable[LoadableModel]) -> set[str]:
        """Return the backends of ``models`` with processes of which no model was measured yet."""
        return {_backend(model) for model in models if _has_process(model)} - self._overhead.keys()

    def of(
        self,
        name: str,
        closure: Mapping[str, tuple[LoadableModel, ModelState]],
        pinned: Mapping[str, Mapping[str, int]],
    ) -> dict[str, Mapping[str, int]]:
        """Return by device the charge of each model of ``closure`` while ``name`` and its dependencies are loaded.

        A guess refuses no model: the sum is reduced to the budget without the charges of ``pinned`` models.
        Raises `LoadError` if the budget is too small for certain.
        """
        least = {each: self._least(model, state) for each, (model, state) in closure.items()}
        if why := self._budget.why_impossible(least, pinned):
            raise LoadError(f"model '{name}' cannot be loaded: {why}")
        more = {each: self._guess(*closure[each]) - known[HOST] for each, known in least.items()}
        total = sum(more.values())
        if HOST in self._budget.limits:
            taken = sum(charge.get(HOST, 0) for charge in (*pinned.values(), *least.values()))
            total = min(total, self._budget.limits[HOST] - taken)
        share = total / max(1, sum(more.values()))
        return {each: {**known, HOST: known[HOST] + int(more[each] * share)} for each, known in least.items()}

    def _least(self, model: LoadableModel, state: ModelState) -> dict[str, int]:
        """Return the least memory of ``model``: the last measurement or its files, and its config."""
        host = max(state.settings.memory, state.measured.get(HOST, model.file_bytes))
        gpus = [f"gpu {gpu}" for gpu in _gpus(model, self._budget)]
        on_gpu = max(state.settings.gpu_memory, model.file_bytes)
        return {HOST: host, **dict.fromkeys(gpus, on_gpu)}

    def _guess(self, model: LoadableModel, state: ModelState) -> int:
        """Return the host memory that ``model`` may need while it is loaded, at least `_least`."""
        overhead = 0
        if not state.measured:
            overhead = self._overhead.get(_backend(model), _PROCESS_BYTES if _has_process(model) else 0)
        return max(self._least(model, state)[HOST], model.file_bytes + overhead, int(_LOADING * model.file_bytes))


def _backend(model: LoadableModel) -> str:
    return model.config.backend or model.config.platform


def _has_process(model: LoadableModel) -> bool:
    """True if the instances probably run in processes."""
    isolation = model.config.parameters["isolation"].string_value if "isolation" in model.config.parameters else ""
    return isolation == "process" or (not isolation and model.config.backend == "python")


def _gpus(model: LoadableModel, budget: MemoryBudget) -> list[int]:
    """Return the GPUs with a budget that instances of ``model`` use."""
    limited = [int(device.partition(" ")[2]) for device in budget.limits if device != HOST]
    found: set[int] = set()
    for group in model.config.instance_group:
        if group.kind == group.KIND_GPU:
            found.update(group.gpus or limited)
    return [gpu for gpu in limited if gpu in found]
