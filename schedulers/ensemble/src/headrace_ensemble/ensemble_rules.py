"""Rules of ``ensemble_scheduling`` that need only the ensemble's config (docs/spec/behaviours.md section 4.8).

`headrace_ensemble.consistency` compares it with the configs of the composing models when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace import ModelConfig, ModelEnsembling, Problem

_FIELD = "ensemble_scheduling"
#: The prefix of parameters that name a tensor on which running a step depends: Headrace's extension for the scheduler.
_WHEN = "ensemble.when."


def check(config: ModelConfig) -> Iterator[Problem]:
    """Check the fields that an ensemble must not have, its steps, and their graph."""
    if config.platform != "ensemble":
        yield Problem(
            _FIELD, f"ensemble scheduling cannot be set for model '{config.name}' whose platform is not ensemble"
        )
        return
    yield from _check_absent(config)
    wrong = list(_check_steps(config.ensemble_scheduling.step, config.name))
    yield from wrong
    if not wrong:
        yield from _Graph(config).check()


def _check_absent(config: ModelConfig) -> Iterator[Problem]:
    name = config.name
    if config.instance_group:
        yield Problem("instance_group", f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        yield Problem("optimization", f"optimization should not be specified for ensemble '{name}'")
    if config.model_warmup:
        yield Problem("model_warmup", f"model_warmup can not be specified for ensemble '{name}'")


def _check_steps(steps: Sequence[ModelEnsembling.Step], name: str) -> Iterator[Problem]:
    if not steps:
        yield Problem(f"{_FIELD}.step", f"must specify 'step' for ensemble '{name}'")
    written: set[str] = set()
    for index, step in enumerate(steps):
        field = f"{_FIELD}.step[{index}]"
        for part in ("model_name", "input_map", "output_map"):
            if not getattr(step, part):
                yield Problem(f"{field}.{part}", f"must specify '{part}' in step {index} of ensemble '{name}'")
        if step.model_version < -1:
            yield Problem(
                f"{field}.model_version",
                f"step {index} of ensemble '{name}' has model_version {step.model_version}, expected -1 for the latest "
                "or an integer >= 0",
            )
        if step.model_name == name:
            yield Problem(
                f"{field}.model_name", f"circular dependency between ensembles: {name} -> ... -> {name} -> {name}"
            )
        yield from _check_maps(step, field, index, name)
        yield from _check_written_once(step, field, index, name, written)


def _check_maps(step: ModelEnsembling.Step, field: str, index: int, name: str) -> Iterator[Problem]:
    for part, tensors in (("input_map", step.input_map), ("output_map", step.output_map)):
        for key in sorted(tensors):
            if not key or not tensors[key]:
                yield Problem(
                    f"{field}.{part}[{key!r}]",
                    f"'{part}' in step {index} of ensemble '{name}' maps '{key}' to '{tensors[key]}', expected the "
                    "name of a tensor on both sides",
                )


def _check_written_once(
    step: ModelEnsembling.Step, field: str, index: int, name: str, written: set[str]
) -> Iterator[Problem]:
    for output in sorted(step.output_map):
        tensor = step.output_map[output]
        if tensor in written:
            yield Problem(
                f"{field}.output_map[{output!r}]",
                f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{name}' step {index}",
            )
        written.add(tensor)


class _Graph:
    """The step that writes and the steps that read each ensemble tensor.

    Each mention of a tensor is visited once, so the time is linear in the size of the config.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._steps = config.ensemble_scheduling.step
        self._writer: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}
        for index, step in enumerate(self._steps):
            for tensor in step.output_map.values():
                self._writer[tensor] = index
            for tensor in set(step.input_map.values()):
                self._readers.setdefault(tensor, []).append(index)
        # A tensor that only determines if a step runs counts as read.
        for key, parameter in self._config.parameters.items():
            if key.startswith(_WHEN):
                self._readers.setdefault(parameter.string_value.removeprefix("!").strip(), [])
        self._ready = self._run()

    def check(self) -> Iterator[Problem]:
        """Check that inputs are used, outputs are written, and no other tensor is unused."""
        name = self._config.name
        for index, io in enumerate(self._config.input):
            if not self._is_known(io.name):
                yield Problem(f"input[{index}].name", f"ensemble input '{io.name}' for ensemble {name}' is not used")
        for index, output in enumerate(self._config.output):
            if not self._is_known(output.name):
                yield Problem(
                    f"output[{index}].name", f"ensemble output '{output.name}' for ensemble {name}' is not used"
                )
            elif output.name not in self._ready:
                yield Problem(f"output[{index}].name", self._explain(output.name))
        outputs = {output.name for output in self._config.output}
        for tensor, field in self._mentions():
            if tensor not in outputs and (tensor not in self._ready or tensor not in self._readers):
                yield Problem(field, f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")

    def _is_known(self, tensor: str) -> bool:
        return tensor in self._writer or tensor in self._readers

    def _mentions(self) -> Iterator[tuple[str, str]]:
        """Yield each tensor once, with the path of the first step that mentions it."""
        first: dict[str, str] = {}
        for index, step in enumerate(self._steps):
            for part in (step.output_map, step.input_map):
                for key in sorted(part):
                    first.setdefault(part[key], f"{_FIELD}.step[{index}]")
        yield from first.items()

    def _run(self) -> set[str]:
        """Return the tensors that exist when every step that can run has run."""
        waits_for = [set(step.input_map.values()) for step in self._steps]
        ready: set[str] = set()
        todo = [tensor.name for tensor in self._config.input]
        while todo:
            tensor = todo.pop()
            if tensor in ready:
                continue
            ready.add(tensor)
            for reader in self._readers.get(tensor, ()):
                waits_for[reader].discard(tensor)
                if not waits_for[reader]:
                    todo.extend(self._steps[reader].output_map.values())
        return ready

    def _explain(self, output: str) -> str:
        """Return why ``output`` is not written: the first missing tensor on the way from it to the inputs."""
        message = f"output '{output}' for ensemble '{self._config.name}' is not written"
        tensor, seen = output, {output}
        while tensor in self._writer:
            missing = sorted(set(self._steps[self._writer[tensor]].input_map.values()) - self._ready - seen)
            if not missing:
                break
            tensor = missing[0]
            seen.add(tensor)
        if tensor == output:
            return message
        return f"{message}: at least one of its depending tensors, '{tensor}', is not connected"
