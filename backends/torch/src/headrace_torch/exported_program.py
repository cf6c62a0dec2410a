"""Programs of torch.export, ``model.pt2``: described without PyTorch, and opened as a function on a device."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from headrace import Model, in_memory, one_line
from headrace_torch.instance import Forward
from headrace_torch.parameters import is_trusted
from headrace_torch.program_check import TrustRequired
from headrace_torch.program_graph import ProgramGraph, devices
from headrace_torch.program_signature import SCALAR_TYPES, ProgramSignature, read_signature
from headrace_torch.pt2_archive import Pt2Archive
from headrace_torch.torch_process import first_line

#: The major version of the schema of programs. PyTorch increases it with an incompatible change.
_SCHEMA = 8
#: The exceptions when a file is parsed that PyTorch did not write.
_MISREAD = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, OverflowError)
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Program:
    """A program or package: ``forward.run(*tensors)`` returns the results, both in the order of ``signature``."""

    forward: Forward
    signature: ProgramSignature

    def close(self) -> None:
        """Release the program."""
        self.forward.close()


def describe_program(archive: Pt2Archive) -> ProgramSignature:
    """Return the signature of the program in ``archive``. Raises `LoadError`."""
    return _ProgramReader(archive).signature


def open_program(torch: Any, model: Model, archive: Pt2Archive, device: str) -> Program:
    """Return the program in ``archive``, on ``device``. Raises `LoadError` naming the file and the fault.

    With ``trust``, PyTorch loads it, which may run code in the file."""
    reader = _ProgramReader(archive)
    return reader.load_by_torch(torch, device) if is_trusted(model) else reader.load(torch, device)


class _ProgramReader:
    def __init__(self, archive: Pt2Archive) -> None:
        self._archive = archive
        self._name = archive.choose("programs", archive.programs)
        self._document: Mapping[str, Any] = archive.document(f"models/{self._name}.json")
        self.signature = self._reading(self._read_signature)

    def load(self, torch: Any, device: str) -> Program:
        try:
            return self._reading(partial(self._load, torch, device))
        except RuntimeError as error:  # of PyTorch, about sizes and memory
            raise self._archive.failure(first_line(error)) from error

    def load_by_torch(self, torch: Any, device: str) -> Program:
        try:
            with in_memory(self._archive.path) as opened, warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of PyTorch about its own code
                program = torch.export.load(opened)
                if device != "cpu" or self._devices() - {"cpu"}:
                    from torch.export.passes import move_to_device_pass

                    program = move_to_device_pass(program, device)
                call = program.module()
            inputs = program.call_spec.in_spec
        except Exception as error:  # code in the file may raise any exception
            raise self._archive.failure(first_line(error)) from error
        if inputs.num_leaves != len(self.signature.inputs):
            raise self._archive.failure(
                "was exported with constants among its arguments, which PyTorch wants again: leave 'trust' out, or them"
            )
        pytree = torch.utils._pytree

        def run(*tensors: Any) -> Sequence[Any]:
            arguments, named = pytree.tree_unflatten(tensors, inputs)
            leaves: list[Any] = pytree.tree_leaves(call(*arguments, **named))
            return leaves

        is_quick, close = device == "cpu", partial(_forget_module, torch, call)
        forward = Forward(run=run, device=device, arguments=None, any_thread=is_quick, close=close)
        return Program(forward, self.signature)

    def _reading(self, what: Callable[[], _Read]) -> _Read:
        try:
            return what()
        except TrustRequired as error:
            raise self._archive.trust_required(str(error)) from None
        except _MISREAD as error:
            reason = str(error) if type(error) is ValueError else f"{type(error).__name__} {error}"
            raise self._archive.failure(f"is no program of torch.export that can be read: {reason}") from error

    def _read_signature(self) -> ProgramSignature:
        version = self._document["schema_version"]["major"]
        if version != _SCHEMA:
            raise ValueError(f"it has version {version} of the schema, and Headrace reads {_SCHEMA}")
        return read_signature(self._document)

    def _load(self, torch: Any, device: str) -> Program:
        place = self._placement(device)
        graph = ProgramGraph(torch, self._document, place)
        weights = _ProgramWeights(torch, self._archive, self._name)
        state = [weights.read(folder, name, device) for folder, name in graph.state]
        run = partial(graph.function.forward, *state)  # type: ignore[attr-defined]
        if graph.mutated:
            names = [name for _, name in graph.state]
            run = partial(_run_and_update, run, [state[names.index(name)] for name in graph.mutated])
        forward = Forward(
            run=run,
            device=device,
            arguments=None,
            writes=graph.writes,
            changes=graph.changes,
            can_warm_up=not (graph.changes or graph.is_random or graph.loops),
            any_thread=device == "cpu" and not graph.loops,
            close=partial(_forget_source, torch, graph.function),
        )
        return Program(forward, self.signature)

    def _devices(self) -> set[str]:
        return set(devices(self._document))

    def _placement(self, device: str) -> Callable[[str], str]:
        """Return a function that maps a device of the file to the one of the instance.

        Accelerators become ``device``. The CPU becomes ``device`` if the program uses no accelerator. Raises
        `LoadError` for a program on several accelerators.
        """
        found = self._devices()
        accelerators = found - {"cpu"}
        if len({each.partition(":")[2] or "0" for each in accelerators}) > 1:
            raise self._archive.failure(
                f"was exported on several devices, {', '.join(sorted(found))}, and an instance runs on one"
            )
        if device == "cpu" or not accelerators:
            return lambda _: device
        return lambda named: "cpu" if named == "cpu" else device


def _forget_source(torch: Any, function: Any) -> None:
    """Remove the source that PyTorch generated for ``function``, and otherwise keeps for tracebacks."""
    file = function.forward.__code__.co_filename
    linecache.cache.pop(file, None)
    torch.fx.graph_module._loader.eval_cache.pop(file, None)


def _forget_module(torch: Any, module: Any) -> None:
    """Remove the source and the weights of ``module``.

    It is part of a reference cycle, which the garbage collector does not free if the server has frozen it.
    """
    _forget_source(torch, module)
    for part in module.modules():
        part._parameters.clear()
        part._buffers.clear()


def _run_and_update(run: Callable[..., Sequence[Any]], buffers: Sequence[Any], *tensors: Any) -> Sequence[Any]:
    """Return results of ``run`` without the last ones, and copy these, the new values, to ``buffers``."""
    results = run(*tensors)
    count = len(results) - len(buffers)
    for buffer, value in zip(buffers, results[count:], strict=True):
        buffer.copy_(value)
    return results[:count]


class _ProgramWeights:
    """Reads ``weights`` and ``constants`` of the program ``name``. Tensors of the same record share memory.

    Raises `TrustRequired` for pickled tensors and objects, which ``torch.export.load`` would unpickle."""

    def __init__(self, torch: Any, archive: Pt2Archive, name: str) -> None:
        self._torch, self._archive = torch, archive
        self._entries: dict[str, Mapping[str, Any]] = {}
        for folder in ("weights", "constants"):
            if f"data/{folder}/{name}.pt" in archive.names(f"data/{folder}/"):
                raise TrustRequired(f"its '{folder}' are one pickle")
            self._entries[folder] = archive.document(f"data/{folder}/{name}_{folder}_config.json")["config"]
            for tensor, entry in self._entries[folder].items():
                if entry["use_pickle"] or entry["tensor_meta"] is None:
                    raise TrustRequired(f"its '{one_line(tensor)[:200]}' is a pickle")
        self._records: dict[str, Any] = {}

    def read(self, folder: str, name: str, device: str) -> Any:
        """Return one tensor, on ``device``."""
        entry = self._entries[folder].get(name)
        if entry is None:
            raise ValueError(f"it has no '{name[:200]}' in its {folder}")
        meta = entry["tensor_meta"]
        dtype = getattr(self._torch, SCALAR_TYPES[meta["dtype"]][0])
        sizes, strides = ([int(size["as_int"]) for size in meta[key]] for key in ("sizes", "strides"))
        elements = self._elements(f"data/{folder}/{entry['path_name']}", dtype)
        if not elements.numel():
            if 0 not in sizes:
                raise ValueError(f"its '{name[:200]}' of {sizes} has no content")
            return self._torch.empty(sizes, dtype=dtype, device=device)
        tensor = elements.as_strided(sizes, strides, int(meta["storage_offset"]["as_int"]))
        return tensor if device == "cpu" else tensor.to(device)

    def _elements(self, record: str, dtype: Any) -> Any:
        if record not in self._records:
            content = self._torch.empty(self._archive.size(record), dtype=self._torch.uint8)
            if content.numel():
                self._archive.read_into(record, memoryview(content.numpy()))
            self._records[record] = content
        return self._records[record].view(dtype)
