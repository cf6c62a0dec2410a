"""The executions that are captured as CUDA graphs: ``optimization { cuda { graphs: true } }`` of a config.

Source: docs/spec/behaviours.md section 7, and the comments on ``ModelOptimizationPolicy.Cuda`` in Triton's
model_config.proto. Triton has them for TensorRT only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace import ConfigError, ModelConfig

#: The default distance of captured sizes up to each number of rows. Beyond the last one, it is 1/8 of the rows.
_DISTANCES = ((8, 1), (32, 4), (128, 8))


@dataclass(frozen=True, slots=True)
class GraphSize:
    """A graph for ``least`` to ``rows`` rows; both are 0 without a batch axis. ``dims`` has the dims, without rows, of
    inputs that differ from the config."""

    rows: int
    least: int
    dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def graph_sizes(config: ModelConfig) -> Sequence[GraphSize]:
    """Return the sizes to capture, the largest first, since it needs the most memory. Raises `ConfigError`."""
    specs = config.optimization.cuda.graph_spec
    found = list(_of_specs(config) if specs else _usual(config))
    return sorted(found, key=lambda size: -size.rows)


def _usual(config: ModelConfig) -> Iterator[GraphSize]:
    """Yield the default sizes: a batch is padded to the next one."""
    most, last = config.max_batch_size, 0
    if not most:
        yield GraphSize(0, 0)
        return
    preferred = set(config.dynamic_batching.preferred_batch_size) - {most}
    for rows in sorted({*(preferred or _steps(most)), most}):
        if rows <= most:
            yield GraphSize(rows, last + 1)
            last = rows


def _steps(most: int) -> Iterator[int]:
    rows = 0
    while rows < most:
        yield (rows := rows + next((step for until, step in _DISTANCES if rows < until), max(16, rows // 8)))


def _of_specs(config: ModelConfig) -> Iterator[GraphSize]:
    """Yield the sizes of the specs. As in Triton, a batch is padded only if its spec has a ``graph_lower_bound``."""
    for index, spec in enumerate(config.optimization.cuda.graph_spec):
        where = f"optimization.cuda.graph_spec[{index}]"
        rows, dims = _read(config, spec, where)
        least = rows
        if spec.HasField("graph_lower_bound"):
            least, lower = _read(config, spec.graph_lower_bound, f"{where}.graph_lower_bound")
            if lower != dims or least > rows:
                raise _wrong(config, where, "has a graph_lower_bound that differs in more than a smaller batch_size")
        yield GraphSize(rows, least, dims)


def _read(config: ModelConfig, spec: Any, where: str) -> tuple[int, dict[str, tuple[int, ...]]]:
    most = config.max_batch_size
    if not most and spec.batch_size:
        raise _wrong(config, where, "expects 'batch_size' to be 0 if 'max_batch_size' is 0")
    if most and not 1 <= spec.batch_size <= most:
        raise _wrong(config, where, f"expects 'batch_size' to be 1 to 'max_batch_size', {most}, not {spec.batch_size}")
    if unknown := sorted(set(spec.input) - {each.name for each in config.input}):
        raise _wrong(config, where, f"has unknown input '{unknown[0]}'")
    return spec.batch_size, {name: tuple(shape.dim) for name, shape in spec.input.items()}


def _wrong(config: ModelConfig, where: str, problem: str) -> ConfigError:
    return ConfigError(f"model '{config.name}': {where} {problem}", field=where)
