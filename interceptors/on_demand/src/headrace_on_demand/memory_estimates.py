"""What a model is charged before and while it is loaded: its memory is not known yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace import LoadableModel, LoadError
from headrace_on_demand.memory_budget import HOST, MemoryBudget
from headrace_on_demand.model_state import ModelState

#: What a process of a model has beside its files before one was measured: an interpreter and NumPy.
_PROCESS_BYTES = 48 << 20
#: An engine has the file, its parsed form and the weights at once while it loads: ONNX Runtime 3.3 times the file.
_LOADING = 3.5


class MemoryEstimates:
    """Estimates for models that are about to be loaded within ``budget``."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        #: By backend, the most that a model in processes had beside its files.
        self._overhead: dict[str, int] = {}

    def learn(self, state: ModelState) -> None:
        """Take over what ``state``, which is loaded in processes, has beside its files."""
        beside = state.process_bytes - state.file_bytes
        self._overhead[state.backend] = max(self._overhead.get(state.backend, 0), beside)

    def unmeasured(self, models: Iterable[LoadableModel]) -> set[str]:
        """Return the backends of those of ``models`` that have processes, of which none was measured yet."""
        return {_backend(model) for model in models if _has_process(model)} - self._overhead.keys()

    def of(
        self,
        name: str,
        wanted: Mapping[str, tuple[LoadableModel, ModelState]],
        pinned: Mapping[str, Mapping[str, int]],
    ) -> dict[str, Mapping[str, int]]:
        """Return by device what each model of ``wanted`` is charged while ``name`` is loaded with what it needs.

        A guess refuses no model: what all need is reduced to the budget without the charges of ``pinned`` models.
        Raises `LoadError` if the budget is too small for certain.
        """
        least = {each: self._least(model, state) for each, (model, state) in wanted.items()}
        if why := self._budget.impossible(least, pinned):
            raise LoadError(f"model '{name}' cannot be loaded: {why}")
        more = {each: self._guess(*wanted[each]) - known[HOST] for each, known in least.items()}
        total = sum(more.values())
        if HOST in self._budget.limits:
            taken = sum(charge.get(HOST, 0) for charge in (*pinned.values(), *least.values()))
            total = min(total, self._budget.limits[HOST] - taken)
        share = total / max(1, sum(more.values()))
        return {each: {**known, HOST: known[HOST] + int(more[each] * share)} for each, known in least.items()}

    def _least(self, model: LoadableModel, state: ModelState) -> dict[str, int]:
        """Return what ``model`` needs for certain: what was measured last, or its files, or what its config says."""
        host = max(state.settings.memory, state.measured.get(HOST, model.file_bytes))
        gpus = [f"gpu {gpu}" for gpu in _gpus(model, self._budget)]
        on_gpu = max(state.settings.gpu_memory, model.file_bytes)
        return {HOST: host, **dict.fromkeys(gpus, on_gpu)}

    def _guess(self, model: LoadableModel, state: ModelState) -> int:
        """Return what ``model`` may need in host memory while it is loaded, from its least on."""
        beside = 0
        if not state.measured:
            beside = self._overhead.get(_backend(model), _PROCESS_BYTES if _has_process(model) else 0)
        return max(self._least(model, state)[HOST], model.file_bytes + beside, int(_LOADING * model.file_bytes))


def _backend(model: LoadableModel) -> str:
    return model.config.backend or model.config.platform


def _has_process(model: LoadableModel) -> bool:
    """True if the instances probably run in processes."""
    isolation = model.config.parameters["isolation"].string_value if "isolation" in model.config.parameters else ""
    return isolation == "process" or (not isolation and model.config.backend == "python")


def _gpus(model: LoadableModel, budget: MemoryBudget) -> list[int]:
    """Return the GPUs of the instances of ``model`` that have a budget."""
    limited = [int(device.partition(" ")[2]) for device in budget.limits if device != HOST]
    found: set[int] = set()
    for group in model.config.instance_group:
        if group.kind == group.KIND_GPU:
            found.update(group.gpus or limited)
    return [gpu for gpu in limited if gpu in found]
