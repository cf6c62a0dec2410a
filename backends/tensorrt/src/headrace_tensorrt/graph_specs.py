"""Chooses the executions to capture as CUDA graphs, and the graph for a batch.

Source: docs/spec/behaviours.md section 10.5, and the comments on ``ModelOptimizationPolicy.Cuda`` in Triton's
model_config.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace import ConfigError, ModelConfig
from headrace_tensorrt.plan_shapes import Profile, Shape

#: The default sizes. Small batches gain most, since their kernels take less time than their launches.
_USUAL_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """An execution to capture: the full shapes of all inputs, and the fewest rows of a batch for which it may be used.

    ``least_rows`` is 0 for a model without a batch axis: its shapes must be equal.
    """

    shapes: Mapping[str, Shape]
    least_rows: int = 0

    @property
    def rows(self) -> int:
        """The rows of all inputs, for a model that batches."""
        return next(iter(self.shapes.values()))[0]

    def fits(self, shapes: Mapping[str, Shape]) -> bool:
        """True if inputs of ``shapes`` can use the graph: they are equal, except for unused rows."""
        if not self.least_rows:
            return shapes == self.shapes
        return all(
            len(shape) == len(self.shapes[name])
            and shape[1:] == self.shapes[name][1:]
            and self.least_rows <= shape[0] <= self.rows
            for name, shape in shapes.items()
        )


def graph_specs(config: ModelConfig, profile: Profile) -> list[GraphSpec]:
    """Return the graphs to capture for ``profile``, with the fewest rows first. Raises `ConfigError`.

    Specs of the config that do not fit ``profile`` are for another one.
    """
    cuda = config.optimization.cuda
    specs = list(_of_config(config, profile) if cuda.graph_spec else _usual(config, profile))
    fitting = [spec for spec in specs if _is_taken(profile, spec)]
    unique = {tuple(sorted(spec.shapes.items())): spec for spec in fitting}
    return sorted(unique.values(), key=lambda spec: sorted(spec.shapes.items()))


def find(specs: Sequence[GraphSpec], shapes: Mapping[str, Shape]) -> GraphSpec | None:
    """Return the first of the ordered ``specs`` that fits, so with the fewest unused rows; else None."""
    return next((spec for spec in specs if spec.fits(shapes)), None)


def _is_taken(profile: Profile, spec: GraphSpec) -> bool:
    try:
        for name, shape in spec.shapes.items():
            profile.shapes[name].distance(shape)
    except ValueError:
        return False
    return True


def _usual(config: ModelConfig, profile: Profile) -> Iterator[GraphSpec]:
    best = {name: bounds.best for name, bounds in profile.shapes.items()}
    if config.max_batch_size == 0:
        yield GraphSpec(best)
        return
    preferred = set(config.dynamic_batching.preferred_batch_size)
    preferred |= set(config.sequence_batching.oldest.preferred_batch_size)
    sizes = {1, *preferred} if preferred else set(_USUAL_ROWS)
    for rows in sorted({*sizes, config.max_batch_size}):
        if rows <= config.max_batch_size:
            yield GraphSpec({name: (rows, *shape[1:]) for name, shape in best.items()}, rows)


def _of_config(config: ModelConfig, profile: Profile) -> Iterator[GraphSpec]:
    for index, spec in enumerate(config.optimization.cuda.graph_spec):
        field = f"optimization.cuda.graph_spec[{index}]"
        shapes = _shapes(config, profile, spec, field)
        least = spec.batch_size
        if spec.HasField("graph_lower_bound"):
            lower = _shapes(config, profile, spec.graph_lower_bound, f"{field}.graph_lower_bound")
            begin = int(config.max_batch_size > 0)
            if any(shape[begin:] != shapes[name][begin:] for name, shape in lower.items()):
                raise ConfigError(
                    f"model '{config.name}': {field}.graph_lower_bound differs from its graph_spec in more than the "
                    "batch: only rows can be left over",
                    field=field,
                )
            least = spec.graph_lower_bound.batch_size
        yield GraphSpec(shapes, least)


def _shapes(config: ModelConfig, profile: Profile, spec: Any, field: str) -> dict[str, Shape]:
    """Return full shapes of all inputs: from ``spec``, else the optimal ones of the profile."""
    if config.max_batch_size == 0 and spec.batch_size != 0:
        raise ConfigError(
            f"model '{config.name}': graph spec expects 'batch_size' to be 0 if 'max_batch_size' is 0", field=field
        )
    if config.max_batch_size > 0 and not 1 <= spec.batch_size <= config.max_batch_size:
        raise ConfigError(
            f"model '{config.name}': graph spec expects 'batch_size' to be between 1 and 'max_batch_size', which is "
            f"{config.max_batch_size}, got {spec.batch_size}",
            field=field,
        )
    unknown = sorted(set(spec.input) - set(profile.shapes))
    if unknown:
        raise ConfigError(f"model '{config.name}': graph spec has unknown input '{unknown[0]}'", field=field)
    shapes: dict[str, Shape] = {}
    batch = (spec.batch_size,) if config.max_batch_size > 0 else ()
    for name, bounds in profile.shapes.items():
        dims = tuple(spec.input[name].dim) if name in spec.input else bounds.best[len(batch) :]
        shapes[name] = (*batch, *dims)
    return shapes
