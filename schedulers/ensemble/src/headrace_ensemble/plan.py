"""The plan of an ensemble: which steps run, and what each waits for and writes.

Made once, at load or per set of requested outputs. Tensors are numbers, which index lists. They belong to streams:
stream 0 is the request, and every decoupled step opens a stream, whose items are its responses. A step reads tensors of
one stream, and runs once per item. Its outputs are in the same item, or open another stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

from headrace import Dependency, InternalError, ModelConfig, OtherModel, Spec, Tensor, Ticket, on_host
from headrace_ensemble.conditions import Condition, conditions

#: Adapts a tensor for its reader, if one of writer and reader has a batch axis and the other has not.
Adapt: TypeAlias = "Callable[[Any], Any]"
_NONE_ON_DEVICE: Mapping[str, bool] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Step:
    """A step of a plan.

    - ``reads``: a tensor for each input of the model. ``drops`` are those that nothing else needs, ``shares`` the
      others, once each.
    - ``writes``: a tensor for each needed output of the model. ``completes`` of them are outputs of the ensemble.
    - ``starts``: the steps that need nothing else than its outputs. ``helps``: for each output and each other step that
      reads it, that step.
    - ``opens``: the stream of its responses, 0 for none.
    - ``waits``: the number of its tensors that come from steps of the same item.
    - ``when``: the tensor of its condition, -1 for none. With ``is_negated``, the step runs if that is false.
    - ``required``: tensors without which it does not run.
    - ``on_device``: the outputs that stay in the memory of a device: `headrace.Ticket.on_device`.
    - ``kind``: the start of `InferRequest.alike` of its requests, before dtypes and shapes of inputs. None if an input
      is strings.
    """

    index: int
    name: str
    version: str
    ask: Callable[[Ticket], None]
    reads: Sequence[tuple[str, int, Adapt | None]]
    drops: Sequence[int]
    shares: Sequence[int]
    writes: Sequence[tuple[str, int]]
    completes: int
    starts: list[Step]
    helps: Sequence[Step]
    outputs: Sequence[str]
    stream: int
    opens: int
    waits: int
    when: int
    is_negated: bool
    required: frozenset[int]
    kind: tuple[object, ...] | None
    on_device: Mapping[str, bool]


@dataclass(slots=True, eq=False)
class DataflowPlan:
    """The steps that compute one set of requested outputs.

    - ``inputs``: the ensemble's. ``first``: the steps that need nothing else.
    - ``waits``: per step, the number of tensors that it waits for.
    - ``uses``: per tensor, the number of steps that read it, plus one if it is an output.
    - ``outputs`` are in the items of ``stream``; steps write ``missing`` of them.
    - ``empty``: None for each tensor. ``callers``: the name of the ensemble.
    - ``limit``: how many items of a stream may run in a step at a time; 0 for any number.
    """

    inputs: Sequence[tuple[str, int]]
    first: list[Step]
    waits: list[int]
    uses: list[int]
    stream: int
    outputs: Sequence[tuple[str, int, Adapt | None]]
    missing: int
    empty: list[None]
    callers: tuple[str]
    limit: int


class EnsembleGraph:
    """The steps of an ensemble and its tensors. ``others`` are the loaded models of the steps."""

    def __init__(self, config: ModelConfig, others: Mapping[Dependency, OtherModel]) -> None:
        self._config = config
        self._models = [others[dependency_of(step)] for step in config.ensemble_scheduling.step]
        self._steps = config.ensemble_scheduling.step
        self._numbers: dict[str, int] = {}
        for name in (*(io.name for io in config.input), *written(config)):
            self._numbers.setdefault(name, len(self._numbers))
        self._writer = {tensor: index for index, step in enumerate(self._steps) for tensor in step.output_map.values()}
        self._conditions = conditions(config)
        self._order = in_order(config)
        #: The tensors that each step waits for.
        self._reads = [reads_of(config, index, self._conditions) for index in range(len(self._steps))]
        self._streams = self._find_streams()
        #: The ensemble's own `headrace.OtherModel.takes_device_tensors`.
        self.takes_device_tensors = self._find_device_inputs()
        self._on_device = self._find_device_tensors()
        #: The steps as in every plan, without their outputs.
        self._bare = [self._step(index) for index in range(len(self._steps))]

    def plan(self, requested: Collection[str] = (), on_device: Mapping[str, bool] = _NONE_ON_DEVICE) -> DataflowPlan:
        """Return the plan for the ``requested`` outputs; for all if there are none.

        ``on_device`` is the `headrace.Ticket.on_device` of its requests.
        """
        names = [output.name for output in self._config.output if not requested or output.name in requested]
        needed = self._needed(names)
        tensors = self._numbers
        steps: dict[int, Step] = {}
        uses, waits = [0] * len(tensors), [0] * len(self._steps)
        readers: dict[str, list[Step]] = {name: [] for name in tensors}
        wanted = {name: on_device.get(name) for name in names}
        for name in names:
            uses[tensors[name]] += 1
        for index in reversed(self._order):  # readers are created before writers
            if index not in needed:
                continue
            steps[index] = made = self._with_writes(self._bare[index], readers, wanted)
            waits[index] = made.waits
            for tensor in self._reads[index]:
                readers[tensor].append(made)
                uses[tensors[tensor]] += 1
        for index, step in steps.items():
            read = sorted(tensors[tensor] for tensor in self._reads[index])
            step.drops, step.shares = [t for t in read if uses[t] == 1], [t for t in read if uses[t] > 1]
        outputs = [(name, tensors[name], self._adapt_output(name, name in on_device)) for name in names]
        missing = sum(name in self._writer for name in names)
        first = [step for index, step in sorted(steps.items()) if not step.stream and not step.waits]
        inputs = [(io.name, tensors[io.name]) for io in self._config.input if uses[tensors[io.name]]]
        return DataflowPlan(
            inputs,
            first,
            waits if any(step.helps for step in steps.values()) else [],
            uses if any(step.shares for step in steps.values()) else [],
            self._stream_of(names[0]) if names else 0,
            outputs,
            missing,
            [None] * len(tensors),
            (self._config.name,),
            self._config.ensemble_scheduling.max_inflight_requests,
        )

    def _needed(self, outputs: Iterable[str]) -> set[int]:
        needed, todo = set[int](), [*outputs]
        while todo:
            index = self._writer.get(todo.pop())
            if index is not None and index not in needed:
                needed.add(index)
                todo += self._reads[index]
        return needed

    def _with_writes(
        self, bare: Step, readers: Mapping[str, Sequence[Step]], requested: Mapping[str, bool | None]
    ) -> Step:
        """Return ``bare`` with the tensors that it writes.

        ``requested`` says where the caller takes an output: on the device, there and in the memory of the host if True,
        and only in the memory of the host if None.
        """
        step, model = self._steps[bare.index], self._models[bare.index]
        written = [each for each in sorted(step.output_map.items()) if readers[each[1]] or each[1] in requested]
        writes = [(output, self._numbers[tensor]) for output, tensor in written]
        following = [each for _, tensor in written for each in sorted(readers[tensor], key=lambda reader: reader.index)]
        # The readers of a stream do not wait for the step that opens it.
        starts = list(dict.fromkeys(each for each in following if each.waits == (not bare.opens)))
        helps = [each for each in following if each.waits > 1 and not bare.opens]
        names = [name for name, _ in writes]
        outputs = () if len(names) == len(model.outputs) else tuple(names)
        kind = None if bare.kind is None else (*bare.kind, outputs)
        on_device: dict[str, bool] = {}
        for output, tensor in step.output_map.items():
            taken = [self._takes(reader.index, tensor) for reader in readers[tensor]]
            if tensor in requested:
                taken += {None: [False], False: [True], True: [True, False]}[requested[tensor]]
            if tensor in self._on_device and any(taken):
                on_device[output] = not all(taken)
        return replace(
            bare,
            writes=writes,
            completes=sum(tensor in requested for _, tensor in written),
            starts=starts,
            helps=helps,
            outputs=outputs,
            kind=kind,
            on_device=on_device,
        )

    def _takes(self, index: int, tensor: str) -> bool:
        """True if step ``index`` accepts ``tensor`` on a device for each input that reads it."""
        taken = self._models[index].takes_device_tensors or ()
        inputs = [name for name, value in self._steps[index].input_map.items() if value == tensor]
        condition = self._conditions.get(index)
        is_condition = condition is not None and condition.tensor == tensor
        return not is_condition and all(name in taken for name in inputs)

    def _leaves(self, tensor: str) -> bool:
        """True if a step writes ``tensor`` that can leave it on a device."""
        writer = self._writer.get(tensor)
        return writer is not None and self._models[writer].takes_device_tensors is not None

    def _find_device_inputs(self) -> frozenset[str] | None:
        """Return the inputs that each of their readers takes on a device. None if no output can stay there either."""
        outputs = {output.name for output in self._config.output}
        readers = {io.name: [i for i, reads in enumerate(self._reads) if io.name in reads] for io in self._config.input}
        found = frozenset(
            name
            for name, steps in readers.items()
            if steps and name not in outputs and all(self._takes(index, name) for index in steps)
        )
        return found if found or any(map(self._leaves, outputs)) else None

    def _find_device_tensors(self) -> frozenset[str]:
        """Return the tensors that may be `headrace.DeviceTensor`s."""
        return (self.takes_device_tensors or frozenset()) | {tensor for tensor in self._writer if self._leaves(tensor)}

    def _step(self, index: int) -> Step:
        step, model = self._steps[index], self._models[index]
        reads = [
            (name, self._numbers[tensor], self._adapt_input(tensor, model, name))
            for name, tensor in sorted(step.input_map.items())
        ]
        stream = self._streams[index]
        opens = index + 1 if model.config.model_transaction_policy.decoupled else 0
        # The step that opens the stream has written its tensors before the item starts.
        awaited = {t for t in self._reads[index] if t in self._writer and not self._opens(self._writer[t])}
        condition = self._conditions.get(index)
        return Step(
            index,
            step.model_name,
            str(step.model_version) if step.model_version >= 0 else "",
            model.ask,
            reads,
            (),
            (),
            (),
            0,
            [],
            (),
            (),
            stream,
            opens,
            len(awaited),
            -1 if condition is None else self._numbers[condition.tensor],
            condition is not None and condition.is_negated,
            frozenset(self._numbers[t] for name, t in step.input_map.items() if not model.inputs[name].optional),
            None if any(model.inputs[name].datatype.name == "BYTES" for name in step.input_map) else (object(),),
            {},
        )

    def _opens(self, index: int) -> bool:
        return self._models[index].config.model_transaction_policy.decoupled

    def _find_streams(self) -> list[int]:
        """Return the stream that each step reads."""
        found = [0] * len(self._steps)
        for index in self._order:
            for tensor in self._reads[index]:
                if (writer := self._writer.get(tensor)) is not None:
                    found[index] = writer + 1 if self._opens(writer) else found[writer]
        return found

    def _stream_of(self, tensor: str) -> int:
        writer = self._writer.get(tensor)
        if writer is None:
            return 0
        return writer + 1 if self._opens(writer) else self._streams[writer]

    def _is_batched(self, tensor: str) -> bool:
        """True if the writer of ``tensor`` gives it a batch axis."""
        writer = self._writer.get(tensor)
        config = self._config if writer is None else self._models[writer].config
        return config.max_batch_size > 0

    def _adapt_input(self, tensor: str, model: OtherModel, name: str) -> Adapt | None:
        adapt = adapter(self._is_batched(tensor), model.config.max_batch_size > 0, len(model.inputs[name].dims))
        return adapt if name in (model.takes_device_tensors or ()) else self._as_array(tensor, adapt)

    def _as_array(self, tensor: str, adapt: Adapt | None) -> Adapt | None:
        """Return ``adapt`` for a reader that takes arrays only."""
        if tensor not in self._on_device:
            return adapt
        return on_host if adapt is None else lambda value: adapt(on_host(value))

    def _adapt_output(self, name: str, stays: bool) -> Adapt | None:
        (spec,) = (Spec.from_config(output) for output in self._config.output if output.name == name)
        is_batched = self._config.max_batch_size > 0
        adapt = adapter(self._is_batched(name), is_batched, len(spec.backend_dims))
        adapt = adapt if stays else self._as_array(name, adapt)
        return adapt if spec.reshape is None else _reshaper(spec, is_batched, adapt)


def dependency_of(step: Any) -> Dependency:
    """Return the model that ``step`` calls."""
    return Dependency(step.model_name, max(step.model_version, -1))


def written(config: ModelConfig) -> list[str]:
    """Return the tensors that steps write, in order of the steps."""
    return [tensor for step in config.ensemble_scheduling.step for _, tensor in sorted(step.output_map.items())]


def reads_of(config: ModelConfig, index: int, found: Mapping[int, Condition]) -> set[str]:
    """Return the tensors that step ``index`` waits for: its inputs, and the tensor of its condition."""
    tensors = set(config.ensemble_scheduling.step[index].input_map.values())
    return tensors | {found[index].tensor} if index in found else tensors


def in_order(config: ModelConfig) -> list[int]:
    """Return the steps in topological order, without steps that can never run."""
    steps, found = config.ensemble_scheduling.step, conditions(config)
    writer = {tensor: index for index, step in enumerate(steps) for tensor in step.output_map.values()}
    before = [{writer[t] for t in reads_of(config, index, found) if t in writer} for index in range(len(steps))]
    behind: dict[int, list[int]] = {}
    for index, those in enumerate(before):
        for each in those:
            behind.setdefault(each, []).append(index)
    order = [index for index, those in enumerate(before) if not those]
    for index in order:  # grows in the loop
        for each in behind.get(index, ()):
            before[each].discard(index)
            if not before[each]:
                order.append(each)
    return order


def adapter(is_batched: bool, wants_batch: bool, rank: int) -> Adapt | None:
    """Return a function that adds the batch axis that a reader wants, or removes one of a single row. None if both
    agree.

    ``rank`` is the number of dims in the reader's config. A tensor that does not fit is passed on; the reader refuses
    it.
    """
    if is_batched == wants_batch:
        return None

    def add_axis(tensor: Any) -> Tensor:
        shape = tensor.shape
        adapted: Tensor = tensor.reshape((1, *shape)) if len(shape) == rank else tensor
        return adapted

    def drop_axis(tensor: Any) -> Tensor:
        shape = tensor.shape
        adapted: Tensor = tensor.reshape(shape[1:]) if len(shape) == rank + 1 and shape[0] == 1 else tensor
        return adapted

    return add_axis if wants_batch else drop_axis


def _reshaper(spec: Spec, is_batched: bool, adapt: Adapt | None) -> Adapt:
    """Return a function that makes the output ``spec`` of an ensemble tensor: ``adapt`` first, then the ``reshape``.

    It raises `InternalError` for a tensor whose elements do not fit the output's dims.
    """

    def undo_reshape(tensor: Any) -> Tensor:
        adapted: Any = tensor if adapt is None else adapt(tensor)
        batch = adapted.shape[:1] if is_batched else ()
        shape = (*batch, *spec.undo_reshape(adapted.shape[len(batch) :]))
        if prod(shape) != prod(adapted.shape):
            raise InternalError(
                f"output tensor shape does not match size of output for '{spec.name}': {list(adapted.shape)} does not "
                f"fit {list(shape)}"
            )
        reshaped: Tensor = adapted.reshape(shape)
        return reshaped

    return undo_reshape
