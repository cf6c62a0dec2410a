"""A model repository that is written from the models of another server."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace import open_regular, why_path_leaves
from headrace_migrate.report import BadInput


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """A model: its ``config`` and its files, as (path in the model's directory, text or source)."""

    name: str
    config: str
    files: Sequence[tuple[str, str | Path]]


def check_name(name: str, source: Path) -> None:
    """Raise `BadInput` if ``name``, which the file ``source`` has, cannot be a directory of a model repository."""
    if not name or "/" in name or name[0] == "." or not name.isprintable() or why_path_leaves(name):
        raise BadInput(f"{source}: '{name}' is no name of a model: expected the name of a directory")


def write_models(target: Path, models: Sequence[WrittenModel]) -> None:
    """Write ``models`` to the new directory ``target``. Raises `BadInput`; nothing is left of it then."""
    try:
        target.mkdir()
        try:
            for model in models:
                directory = target / model.name
                (directory / "1").mkdir(parents=True)
                (directory / "config.pbtxt").write_text(model.config, encoding="utf-8")
                for name, content in model.files:
                    _write(directory / name, content)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
    except OSError as error:
        raise BadInput(f"{error.filename or target} cannot be copied or written: {error.strerror or error}") from error


def _write(path: Path, content: str | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
        return
    with open_regular(content) as source, path.open("xb") as file:
        shutil.copyfileobj(source, file)
    path.chmod(0o644)


def batching(max_batch_size: int, delay_us: int, instances: int) -> str:
    """Return the lines of a config for batches of requests and for instances; 0 leaves one out."""
    lines = [f"max_batch_size: {max_batch_size}"]
    if max_batch_size > 1:
        delay = f" max_queue_delay_microseconds: {delay_us} " if delay_us else " "
        lines.append(f"dynamic_batching {{{delay}}}")
    if instances > 1:
        lines.append(f"instance_group {{ count: {instances} kind: KIND_CPU }}")
    return "\n".join(lines)
